"""`corral model get` from a hub, by the command line, to an answer of the engine."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.corral_cli import PATIENCE_S, CorralCli, until
from support.hub import CONTENT, FILE, REPO, FakeHub, Refusal

TINY = "org/tiny-GGUF"


@pytest.fixture
def hub(corral: CorralCli, tiny_model: Path) -> Iterator[FakeHub]:
    model = tiny_model.read_bytes()
    files = {"tiny-Q8_0.gguf": model, "tiny-Q4_K_M.gguf": model, "mmproj-F16.gguf": model[:999]}
    for name in [name for name in corral.env if name.startswith("HF_")]:
        del corral.env[name]
    with FakeHub({TINY: files, REPO: {FILE: CONTENT}}).running() as one:
        corral.env |= {"HF_ENDPOINT": one.url, "HF_HOME": str(corral.root / "hf")}
        yield one


def parts(corral: CorralCli) -> list[Path]:
    return list((corral.root / "hf").rglob("*.incomplete"))


def test_a_model_is_fetched_and_served(corral: CorralCli, hub: FakeHub) -> None:
    got = corral.data("model", "get", f"{TINY}:Q8_0", "--no-projector")
    assert got["received_bytes"] == got["size_bytes"]
    assert got["missing_bytes"] == 0
    assert [file["kind"] for file in got["files"]] == ["model"]
    corral.configure("")
    assert got["name"] == f"{TINY}:Q8_0"
    corral.ok("start", got["name"])
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    answer = httpx.post(f"{corral.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["usage"]["completion_tokens"] == 4
    corral.ok("stop")


def test_a_quantisation_is_chosen_and_told_before_it_comes(corral: CorralCli, hub: FakeHub) -> None:
    shown = corral("model", "get", TINY, "--dry-run")
    assert shown.returncode == 0
    assert "Q8_0" in shown.stderr
    assert "main memory" in shown.stderr
    assert "--no-projector leaves it out" in shown.stderr
    assert parts(corral) == []
    assert "PyPI" in corral.ok("model", "get", "smollm2", "--dry-run")
    got = corral("model", "get", TINY)
    assert got.stdout.strip().endswith("tiny-Q8_0.gguf")
    assert Path(got.stdout.strip()).is_file()
    assert "download · 100 %" in got.stderr
    before = len(hub.seen)
    corral.env["HF_HUB_OFFLINE"] = "1"
    assert corral("model", "get", TINY).stdout == got.stdout
    assert len(hub.seen) == before
    assert corral("model", "get", REPO).returncode == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_download_continues(corral: CorralCli, hub: FakeHub, how: signal.Signals) -> None:
    """A file named directly may be no model, so its header is not requested."""
    hub.repositories[REPO] = {"mmproj-F16.gguf": CONTENT}
    words = ["model", "get", f"{REPO}:mmproj-F16.gguf"]
    # The first transfer is cut; then the hub asks to wait.
    hub.cuts = [200_000]
    hub.refusals = [None, Refusal(503, {"retry-after": "50"})]
    process = subprocess.Popen(
        corral.argv(*words, "--json"),
        env=corral.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    until(lambda: hub.requests("resolve") == 2)
    process.send_signal(how)
    out, _ = process.communicate(timeout=PATIENCE_S)
    (part,) = parts(corral)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "continues where it stopped" in json.loads(out)["error"]["hint"]
    assert part.stat().st_size == 200_000
    hub.served_bytes.clear()
    got = corral.data(*words)
    assert Path(got["path"]).read_bytes() == CONTENT
    assert got["received_bytes"] == hub.served_bytes["mmproj-F16.gguf"]
    assert got["received_bytes"] == len(CONTENT) - 200_000
    assert parts(corral) == []


def test_a_cache_that_cannot_be_used_is_named(corral: CorralCli, hub: FakeHub) -> None:
    where = corral.root / "hf" / "hub" / f"models--{TINY.replace('/', '--')}"
    where.mkdir(parents=True)
    (where / "snapshots").write_text("a file")
    failed = corral("model", "get", f"{TINY}:Q8_0")
    assert failed.returncode == 1
    assert "snapshots" in failed.stderr
    assert "set HF_HOME" in failed.stderr


def test_a_hub_is_searched(corral: CorralCli, hub: FakeHub) -> None:
    (found,) = corral.data("model", "search", "tiny")
    assert found["repo"] == TINY
    assert found["quantisations"].keys() == {"Q8_0", "Q4_K_M"}
    assert found["date"] == "2026-10-01"
    nothing = corral("model", "search", "no-such-model")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no GGUF repository" in nothing.stderr


def test_a_url_is_fetched_into_the_models_directory(corral: CorralCli, hub: FakeHub) -> None:
    url = f"{hub.cdn_url}/{TINY}/tiny-Q8_0.gguf"
    got = corral.data("model", "get", url)
    path = Path(got["path"])
    assert path == corral.root / "data" / "models" / "tiny-Q8_0.gguf"
    assert [file["sha256"] for file in got["files"]] == [hub.digest("", path.read_bytes())]
    assert corral.data("model", "get", url)["received_bytes"] == 0
    path.write_bytes(b"mine")
    assert corral("model", "get", url).returncode == 1
    assert path.read_bytes() == b"mine"


def test_a_model_of_ollamas_registry_is_ollamas_to_download(corral: CorralCli) -> None:
    refused = corral("model", "get", "ollama:llama3.2")
    assert refused.returncode == 4
    assert "ollama pull llama3.2 stores it" in refused.stderr
