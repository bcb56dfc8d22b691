"""A capture of a real model has its requests and answers, no key, and can be played again."""

from __future__ import annotations

import json
import stat
import urllib.request
from pathlib import Path

from support.corral_cli import CorralCli, until

SETTINGS = """
[supervisor]
persist_slots = false
[models.chat]
path = "{model}"
flags = {{ parallel = 1, ctx-size = 2048, threads = 1 }}
"""


def ask(url: str, *, is_stream: bool, temperature: float = 0.0) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    body = {"model": "chat", "messages": messages, "max_tokens": 4, "temperature": temperature}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions?key=sk-secret",
        json.dumps({**body, "stream": is_stream, "api_key": "sk-secret"}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer sk-secret"},
    )
    urllib.request.urlopen(request).read()


def test_a_capture_ends_with_its_last_request(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(model=tiny_model))
    corral.ok("start")
    assert corral.fork_server
    file = corral.root / "it.jsonl"
    words = ["capture", "--model", "chat", "--max-requests", "2", "--output", str(file)]
    capture = corral.fork_server.start(words, corral.env, corral.root, {})
    until(lambda: corral.status().capture is not None)
    assert corral("capture", "--model", "chat").returncode == 69
    ask(corral.url, is_stream=False)
    ask(corral.url, is_stream=True, temperature=2.0)
    assert capture.wait() == 0
    assert corral.status().capture is None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"sk-secret" not in file.read_bytes()
    head, *lines, end = map(json.loads, file.read_text("utf-8").splitlines())
    assert head["fingerprint"]["size_bytes"] == tiny_model.stat().st_size
    assert [line["type"] for line in lines] == ["request", "response"] * 2
    assert all(line["timings"]["decoded_tokens"] for line in lines[1::2])
    assert lines[3]["chunks"][-1][1].endswith("data: [DONE]\n\n")
    assert end["reason"] == "requests"
    there = corral(*words)
    assert there.returncode == 1
    assert "exists already" in there.stderr

    _replay(corral, file)


def _replay(corral: CorralCli, file: Path) -> None:
    """The greedy answer is compared with the captured one, the sampled one with a first play."""
    found = corral.data("replay", str(file), "--set", "batch-size=64")
    assert [request["compared"] for request in found["requests"]] == [True, True]
    assert [request["difference"] for request in found["requests"]] == [None, None]
    assert found["replay"]["decode_rate"] > 0
    assert found["present"]["generated_tokens"] == found["replay"]["generated_tokens"] == 8
    assert found["replay"]["cached_tokens"] > 0
    against = corral.data("replay", str(file), "--daemon")
    assert [request["compared"] for request in against["requests"]] == [True, False]
    assert corral("replay", str(file), "--set", "nonsense=1").returncode == 78
