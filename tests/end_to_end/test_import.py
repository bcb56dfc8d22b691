"""llama-corral starts engines with the same options as the programs that it replaces."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.corral_cli import CorralCli
from support.stores_layout import HuggingFace

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
    pid = corral.instances()["a.0"].pid
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


def test_an_api_key_is_taken_over_and_required(corral: CorralCli, tiny_model: Path) -> None:
    command = ["llama-server", "-m", str(tiny_model), "--host", "0.0.0.0", "--port", "0"]  # noqa: S104 (the case)
    shown = corral("import", "--write", "--", *command, "--api-key", "secret")
    assert shown.returncode == 0
    assert "secret" not in shown.stdout + shown.stderr
    keys = corral.root / "config" / "keys.toml"
    assert keys.stat().st_mode & 0o777 == 0o600
    assert "secret" not in keys.read_text("utf-8")
    corral.serve(until_ready=False)
    corral.ok("start")
    assert status_code(corral, None) == 401
    assert status_code(corral, "secret") == 200
    assert corral.data("status")["keyless"] == []


def test_a_settings_file_that_is_there_keeps_its_address_and_keys(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure("")
    command = ["llama-server", "-m", str(tiny_model), "--api-key", "secret", "--port", "9"]
    shown = corral("import", "--write", "--", *command)
    assert "not taken over: proxy (listen, api_keys_file)" in shown.stderr
    assert "not taken over: the API key: corral key add NAME makes one" in shown.stderr
    assert not (corral.root / "config" / "keys.toml").exists()


def test_an_engine_that_is_not_here_is_left_out(corral: CorralCli, tiny_model: Path) -> None:
    shown = corral("import", "--", "/app/llama-server", "-m", str(tiny_model))
    assert "engine" not in shown.stdout.replace("own engine is used", "")
    assert "not taken over: /app/llama-server: there is no such program here" in shown.stderr


def test_an_address_without_a_key_stays_on_this_machine(
    corral: CorralCli, tiny_model: Path
) -> None:
    command = ["llama-server", "-m", str(tiny_model), "--host", "0.0.0.0", "--port", "9"]  # noqa: S104 (the case)
    shown = corral("import", "--write", "--", *command)
    assert "not taken over: listening on 0.0.0.0: without an API key" in shown.stderr
    settings = (corral.root / "config" / "corral.toml").read_text("utf-8")
    assert 'listen = "127.0.0.1:9"' in settings


def test_a_proxy_that_others_reach_without_a_key_is_named(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(f'[proxy]\nlisten = "0.0.0.0:0"\n[models.a]\npath = "{tiny_model}"\n')
    sentence = "other machines can reach 0.0.0.0:0, and no key is required"
    assert sentence in corral("start").stderr
    assert sentence in corral.ok("status")
    first = (corral.root / "log" / "daemon.log").read_text("utf-8").splitlines()[0]
    assert '"event":"daemon.open"' in first
    assert '"keyless":"0.0.0.0:0"' in first


def test_a_model_of_the_hub_is_served_from_the_store_that_has_it(
    corral: CorralCli, tiny_model: Path, tmp_path: Path
) -> None:
    hub = HuggingFace(tmp_path / "hub")
    corral.env["HF_HUB_CACHE"] = str(hub.root)
    corral.configure("")
    corral.ok("import", "--write", "--", "llama-server", "-hf", "org/Tiny-GGUF:Q8_0", "-np", "1")
    failed = corral("start")
    assert failed.returncode != 0
    assert "hf:org/Tiny-GGUF:Q8_0 is not stored on this machine" in failed.stderr
    assert "corral model get org/Tiny-GGUF:Q8_0 fetches it" in failed.stderr
    corral.serve(until_ready=False)
    corral("start")
    link = hub.add("org/Tiny-GGUF", "tiny-Q8_0.gguf", tiny_model.read_bytes())
    corral.ok("start")  # the settings were read before it was there
    argv = corral.data("plan", "Tiny")["argv"]
    assert argv[argv.index("--model") + 1] == str(link)
    assert corral.instances()["Tiny.0"].state == "ready"


def status_code(corral: CorralCli, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{corral.url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
