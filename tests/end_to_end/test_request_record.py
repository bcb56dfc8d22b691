"""Requests are recorded by figures, and no word of them reaches a file."""

from __future__ import annotations

import json
import os
import secrets
import signal
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli, until

from supervisor.records.requests import RecordedRequest
from supervisor.records.store import RecordStore

SETTINGS = """
[supervisor]
persist_slots = false
record_requests = {record}
[models.chat]
path = "{model}"
flags = {{ parallel = 2, ctx-size = 2048, threads = 1 }}
"""


def ask(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "chat", "messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Session-Id": messages[0]["content"]},
    )
    with urllib.request.urlopen(request) as response:
        content: dict[str, Any] = json.load(response)
    return str(content["choices"][0]["message"]["content"])


def converse(url: str, word: str, turns: int) -> list[str]:
    """Hold a conversation; return its answers."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{word} and {turn}"})
        messages.append({"role": "assistant", "content": ask(url, messages)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def recorded(corral: CorralCli) -> list[RecordedRequest]:
    """Return the records of the file, without a daemon."""
    with closing(RecordStore(corral.root / "data")) as store:
        return list(store.answer("sizes", "chat"))


def everything_below(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_figures_are_recorded_and_no_text(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(model=tiny_model, record="true"))
    corral.ok("start")
    words = [secrets.token_hex(8) for _ in range(2)]
    answers = [answer for word in words for answer in converse(corral.url, word, 3)]
    until(lambda: corral.data("record", "show")["models"] == {"chat": 6})
    os.kill(corral.daemon_pid, signal.SIGKILL)
    found = recorded(corral)
    first, second = ([entry.prompt_tokens for entry in found[at : at + 3]] for at in (0, 3))
    assert first == sorted(set(first))
    assert len(first) == len(second) == 3
    assert len({entry.conversation for entry in found}) == 2
    assert all(entry.ended_at > entry.began_at for entry in found)
    assert {entry.generated_tokens for entry in found} == {8}
    written = everything_below(corral.root).decode(errors="replace")
    assert not [word for word in (*words, *answers) if word in written]
    assert corral.data("record", "show")["models"] == {"chat": 6}
    assert corral.data("record", "forget", "--all") == {"chat": 6}
    assert corral.ok("record", "show") == "no recorded requests\n"


def test_nothing_is_recorded_where_that_is_off(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(model=tiny_model, record="false"))
    corral.ok("start")
    converse(corral.url, "hello", 1)
    corral.ok("stop")
    assert corral.ok("record", "show") == "no recorded requests\n"
    assert corral("record", "forget").returncode == 78
