"""What other programs started, llama-corral starts with the same options."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from corral_cli import CorralCli

OPTIONS = {"--ctx-size": "2048", "--parallel": "2", "--threads": "1", "--temp": "0.5"}
LINE = " ".join(f"{name} {value}" for name, value in OPTIONS.items())


def sources(model: Path) -> dict[str, str]:
    command = f"llama-server -m ${{m}} {LINE}"
    return {
        "swap.yaml": f"macros:\n  m: {model}\nmodels:\n  a: {{cmd: '{command}'}}\n",
        "preset.ini": f"[*]\nc = 2048\ntemp = 0.5\n[a]\nmodel = {model}\nnp = 2\nthreads = 1\n",
        "run.sh": f"exec llama-server \\\n  --model {model} --alias a \\\n  {LINE}\n",
    }


@pytest.mark.parametrize("name", ["swap.yaml", "preset.ini", "run.sh"])
def test_a_file_is_taken_over_flag_by_flag(
    corral: CorralCli, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    source = tmp_path / name
    source.write_text(sources(tiny_model)[name], "utf-8")
    corral.ok("import", str(source), "--write")
    words = corral.data("plan", "a")["argv"]
    assert {word: words[words.index(word) + 1] for word in OPTIONS} == OPTIONS
    assert words[words.index("--model") + 1] == str(tiny_model)


def test_a_pasted_command_is_served(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure("# mine\n")
    command = ["llama-server", "-m", str(tiny_model), "--alias", "a", *LINE.split()]
    shown = corral("import", "--", *command)
    assert "ctx-size = 2048" in shown.stdout
    corral.ok("import", "--write", "--", *command)
    assert (corral.root / "config" / "corral.toml").read_text("utf-8").startswith("# mine\n")
    corral.ok("start")
    pid = corral.instances()["a.0"]["pid"]
    words = Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0")
    assert {word: words[words.index(word) + 1] for word in OPTIONS} == OPTIONS
    again = corral("import", "--write", "--", *command)
    assert again.returncode == 78
    assert "the settings have a model a already" in again.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "there is no file nowhere.yaml"),
        (["--", "vllm", "serve", "x"], "vllm is not llama-server"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_taken_over(corral: CorralCli, words: list[str], message: str) -> None:
    failed: subprocess.CompletedProcess[str] = corral("import", *words)
    assert failed.returncode in {2, 78}
    assert message in failed.stderr
