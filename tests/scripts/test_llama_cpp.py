"""llama.cpp's server tests on the engine and through llama-corral: options, outcomes, reasons."""

from __future__ import annotations

import shlex
from pathlib import Path

from scripts.llama_cpp.outcomes import compare, read_outcomes
from scripts.llama_cpp.stand_in import CommandLine, settings
from supervisor.engines.discover import Engine

WORDS = shlex.split(
    "--port 8081 --hf-repo ggml-org/test-model-stories260K --batch-size 32 --no-slots -fa on "
    "--alias tiny,small --ctx-size 512 --jinja --api-key sk-secret-of-tests"
)


def test_a_command_line_becomes_settings(tmp_path: Path, engine: Engine) -> None:
    line = CommandLine.read(WORDS, engine)
    model = line.model(tmp_path)
    assert model == tmp_path / "tiny.gguf"
    found = settings(line, model, tmp_path)
    assert found["models"] == {
        "tiny": {
            "path": str(model),
            "aliases": ["small", "*"],
            "flags": {"batch-size": "32", "flash-attn": "on", "ctx-size": "512", "jinja": True},
        }
    }
    assert found["proxy"] == {
        "listen": "127.0.0.1:8081",
        "api_keys_file": str(tmp_path / "keys.toml"),
    }


def test_outcomes_are_read_from_a_junit_file(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(
        '<testsuites><testsuite><testcase classname="unit.test_a" name="test_x"/>'
        '<testcase classname="unit.test_a" name="test_y"><failure/></testcase>'
        '<testcase classname="unit.test_a" name="test_z"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert read_outcomes(tmp_path / "a.xml") == {
        "unit.test_a::test_x": "passed",
        "unit.test_a::test_y": "failed",
        "unit.test_a::test_z": "skipped",
    }


def test_a_difference_has_a_decision_or_is_one_of_ours() -> None:
    names = ("unit.test_a::test_x", "unit.test_a::test_y", "unit.test_router::test_z")
    found = compare(dict.fromkeys(names, "passed"), {names[0]: "passed", names[1]: "failed"})
    assert found.passed == 1
    assert found.decided == {names[2]: "models come from the settings"}
    assert found.different == (names[1],)
