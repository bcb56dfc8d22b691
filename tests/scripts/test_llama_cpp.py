"""llama.cpp's server tests on the engine and through llama-corral: options, outcomes, reasons."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts.llama_cpp.outcomes import compare, decisions, read_outcomes
from scripts.llama_cpp.stand_in import ROUTER_MODELS, CommandLine, OptionRefused, settings
from supervisor.builds.discover import Engine

WORDS = shlex.split(
    "--port 8081 --hf-repo ggml-org/test-model-stories260K --batch-size 32 --no-slots -fa on "
    "--alias tiny,small --ctx-size 512 --jinja --api-key sk-secret-of-tests"
)


def test_a_command_line_becomes_settings(tmp_path: Path, engine: Engine) -> None:
    line = CommandLine.read(WORDS, engine)
    model = line.model(tmp_path)
    assert model == tmp_path / "tiny.gguf"
    found = settings(line, {"": model}, tmp_path)
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
    x, y, z = ("unit.test_a::test_x", "unit.test_a::test_y[/a]", "unit.test_b::test_z")
    reasons = {x: "outdated", z: "models come from the settings"}
    found = compare(dict.fromkeys((x, y, z), "passed"), {x: "passed", y: "failed"}, reasons)
    assert found.passed == 1
    assert found.decided == {z: "models come from the settings"}
    assert found.different == (y,)
    assert found.outdated == (x,)


def test_each_decided_difference_is_one_test_and_few_are_left() -> None:
    found = decisions()
    assert len(found) <= 52
    assert all(re.fullmatch(r"unit\.test_\w+::test_\w+(\[.+\])?", name) for name in found)
    assert all(found.values())


def test_a_refused_option_ends_the_test_at_once(tmp_path: Path, engine: Engine) -> None:
    line = CommandLine.read(shlex.split("--port 8081 --log-file x"), engine)
    with pytest.raises(OptionRefused, match="manages the log"):
        settings(line, {}, tmp_path)


@pytest.mark.parametrize("option", ["--tools all", "--mcp-servers-json {}", "--ui-mcp-proxy"])
def test_an_option_for_tools_sets_engine_tools(tmp_path: Path, engine: Engine, option: str) -> None:
    line = CommandLine.read(shlex.split(f"--port 8081 {option}"), engine)
    found = settings(line, {"tiny": tmp_path / "tiny.gguf"}, tmp_path)
    assert "'engine_tools': True" in str(found["models"])


def test_router_mode_has_models_with_the_names_of_a_hub(tmp_path: Path, engine: Engine) -> None:
    words = shlex.split("--port 8081 --models-max 2 --no-models-autoload --ctx-size 512")
    line = CommandLine.read(words, engine)
    assert line.is_router
    name, path = ROUTER_MODELS[0], tmp_path / "tiny.gguf"
    found = settings(line, {name: path}, tmp_path)
    table = {"path": str(path), "flags": {"ctx-size": "512"}, "preload": False}
    assert found["models"] == {name: table}
