"""`corral requests` shows the requests of a real engine, and ends them."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, begin_stream, rest_of, until


def test_a_stream_is_listed_and_cancelled(corral: CorralCli, slow_model: Path) -> None:
    flags = "{ ctx-size = 4096, parallel = 1, threads = 1 }"
    corral.configure(f'[models.m]\npath = "{slow_model}"\nflags = {flags}\n')
    assert corral("requests").returncode == 3
    corral.ok("start")
    assert "no request is in flight" in corral("requests").stdout
    with begin_stream(corral, 30_000, "m") as stream:
        until(lambda: b'"content"' in stream.readline())
        (found,) = corral.data("requests")
        assert (found["model"], found["instance"], found["phase"]) == ("m", "m.0", "decode")
        assert f"{found['id']}  " in corral("requests").stdout
        assert "cancelled" in corral("requests", "cancel", found["id"]).stdout
        assert "request_cancelled" in rest_of(stream)
    until(lambda: corral.data("requests") == [])
    unknown = corral("requests", "cancel", "nothing")
    assert unknown.returncode == 4
    assert "no request in flight has the id nothing" in unknown.stderr


def test_what_ended_is_shown_with_and_without_a_daemon_and_has_no_text(
    corral: CorralCli, tiny_model: Path
) -> None:
    word = f"canary{secrets.token_hex(8)}"
    corral.configure(f'[models.m]\npath = "{tiny_model}"\n')
    corral.ok("start")
    for number, body in enumerate(canaries(word)):
        asked(corral, body, word, f"r{number}")
    found = corral.data("requests", "--last", "50")
    assert {entry["id"]: entry["status"] for entry in found} == {
        "r0": 200,
        "r1": 200,
        "r2": 400,
        "r3": 400,
    }
    assert "r0: 200 after" in corral.ok("requests", "show", "r0")
    assert [request["id"] for request in corral.data("requests", "--failed", "-n", "1")] == ["r3"]
    metrics = urllib.request.urlopen(f"{corral.url}/metrics", timeout=60).read()
    shown = corral.ok("requests", "--since", "1h", "--json")
    corral.ok("stop")
    assert corral.data("requests", "--last", "50") == found
    stored = [path for path in corral.root.rglob("*") if path.is_file()]
    leaks = [path for path in stored if word.encode() in path.read_bytes()]
    assert (leaks, word in shown, word.encode() in metrics) == ([], False, False)
    assert corral.data("requests", "forget", "--model", "m") == {"count": 4}
    assert corral("requests", "show", "r0").returncode == 4


def canaries(word: str) -> Iterator[dict[str, Any]]:
    """Yield chats that have a word in their prompt and tools, and make the engine say it."""
    ask = {"messages": [{"role": "user", "content": f"say {word}"}], "max_tokens": 40}
    tool = {"name": word, "description": word, "parameters": {"type": "object", "title": word}}
    yield {**ask, "grammar": f'root ::= "{word}"'}
    yield {**ask, "stream": True, "tools": [{"type": "function", "function": tool}]}
    yield {**ask, "grammar": f"root ::= {word}"}
    yield {**ask, "tools": [{"type": word}]}


def asked(corral: CorralCli, body: dict[str, Any], key: str, request_id: str) -> bytes:
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {key}",
        "X-Request-Id": request_id,
    }
    url = f"{corral.url}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        return error.read()
