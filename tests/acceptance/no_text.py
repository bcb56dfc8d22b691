"""Sends a random word in all that a client may send, and looks for it where it must not be.

Prompts, tools, schemas, grammars, answers, keys, headers and malformed requests go to a daemon with
the pinned model; the word must not be in its history, events, metrics, logs, status and report.
Conversations and learned prompts on disk are texts on purpose. Exits with 1 where it is found.
"""

from __future__ import annotations

import json
import secrets
import sys
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from support.corral_cli import CorralCli

from supervisor.errors import CorralError
from supervisor.models import pinned
from supervisor.system.paths import directories

_CHAT: Final = "/v1/chat/completions"
_TEXTS_ON_PURPOSE: Final = frozenset({"slots", "prompts", "config"})
_SETTINGS: Final = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "keys.toml"

[proxy.ollama]
enabled = true

[models.chat]
path = "{path}"
flags = {{ ctx-size = 2048, parallel = 2 }}
"""


def main() -> int:
    word = f"zq{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as directory:
        corral = CorralCli(Path(directory))
        model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
        corral.configure(_SETTINGS.format(path=model))
        key = corral.ok("key", "add", "tester").split()[0]
        corral.ok("start")
        try:
            events: list[str] = []
            watch = threading.Thread(target=_watch, args=(corral, events), daemon=True)
            watch.start()
            statuses = [_send(corral.url, key, path, body, {}) for path, body in _bodies(word)]
            statuses += [_send(corral.url, key, *header) for header in _headers(word)]
            found = dict(_surfaces(corral, key, events))
        finally:
            corral("stop")
            corral.end()
    return _print(found, (word, key), statuses)


def _print(found: Mapping[str, bytes], words: tuple[str, ...], statuses: list[int]) -> int:
    counts = ", ".join(
        f"{statuses.count(status)} with {status}" for status in sorted(set(statuses))
    )
    print(f"{len(statuses)} requests: {counts}")
    is_found = False
    for name, content in found.items():
        count = sum(content.count(word.encode()) for word in words)
        is_found |= bool(count)
        print(f"{name:40}  {len(content):>9} bytes  {count or 'not found'}")
    return int(is_found)


def _bodies(word: str) -> Iterator[tuple[str, Any]]:
    ask = {"messages": [{"role": "user", "content": f"say {word}"}], "max_tokens": 12}
    schema = {"type": "object", "properties": {word: {"type": "string", "enum": [word]}}}
    function = {"name": f"t_{word}", "description": word, "parameters": schema}
    tools = [{"type": "function", "function": function}]
    call = {"id": word, "type": "function", "function": {"name": word, "arguments": word}}
    yield _CHAT, {**ask, "grammar": f'root ::= "{word}"'}
    yield _CHAT, {**ask, "grammar": f'root ::= "{word}"', "stream": True}
    for members in (
        {"tools": tools},
        {"tools": tools, "tool_choice": "required", "stream": True},
        {"grammar": f'root ::= {word}( "x\nother ::= {word}'},
        {"grammar": f"root ::= {word}"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": word}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"response_format": {"type": word}},
        {"tool_choice": word},
        {"tools": [{"type": word}]},
        {"max_tokens": word},
        {"temperature": word},
        {"stop": {word: 1}},
        {"chat_template_kwargs": {"enable_thinking": word}},
        {"lora": [{"name": word}]},
        {"logit_bias": {word: 1}},
        {"reasoning_format": word},
        {"samplers": [word]},
        {"messages": word},
        {"messages": [{"role": word, "content": word}]},
        {"messages": [{"role": "user", "content": [{"type": word, "text": word}]}]},
        {"messages": [{"role": "user", "content": {word: 1}}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": word * 9000}]},
    ):
        yield _CHAT, {**ask, **members}
    yield _CHAT, f'{{"messages": "{word}", broken'.encode()
    yield "/completion", {"prompt": word, "n_predict": 3}
    yield "/completion", {"prompt": {word: word}}
    yield "/completion", {"prompt": word, "json_schema": {"$ref": f"#/{word}"}}
    yield "/v1/completions", {"prompt": [word, f"{word} {word}"], "max_tokens": 2}
    yield "/v1/messages", {**ask, "tools": [{"name": word, "input_schema": {"type": word}}]}
    yield "/v1/responses", {"input": word, "instructions": word, "max_output_tokens": 4}
    yield "/infill", {"input_prefix": word, "input_suffix": word}
    yield "/tokenize", {"content": word}
    yield "/apply-template", ask
    yield "/v1/embeddings", {"input": word}
    yield "/rerank", {"query": word, "documents": [word]}
    yield "/api/chat", {**ask, "model": "chat", "stream": False, "options": {word: 1}}
    yield "/corral/v1/estimate", {**ask, "tools": tools}


def _headers(word: str) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for name in (
        "X-Api-Key",
        "X-Session-Id",
        "User-Agent",
        "X-Corral-Priority",
        "X-Corral-Explain",
        "Cookie",
    ):
        yield _CHAT, ask, {name: word}
    yield _CHAT, ask, {"Authorization": f"Bearer {word}"}
    yield f"{_CHAT}?api_key={word}", ask, {}


def _send(url: str, key: str, path: str, body: Any, headers: Mapping[str, str]) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **headers}
    try:
        request = urllib.request.Request(url + path, content, given)
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _watch(corral: CorralCli, events: list[str]) -> None:
    with suppress(CorralError):
        events.extend(json.dumps(message) for message in corral.client.events())


def _surfaces(corral: CorralCli, key: str, events: list[str]) -> Iterator[tuple[str, bytes]]:
    history = corral.data("requests", "--last", "1000")
    yield "corral requests --last", json.dumps(history).encode()
    shown = "".join(corral.ok("requests", "show", entry["id"]) for entry in history)
    yield "corral requests show", shown.encode()
    yield "corral status", corral.ok("status", "--json").encode()
    yield "corral usage", corral.ok("usage", "--json").encode()
    for path in ("/metrics", "/corral/v1/slots", "/slots", "/corral/v1/usage"):
        request = urllib.request.Request(corral.url + path, headers={"X-Api-Key": key})
        with urllib.request.urlopen(request, timeout=20) as response:
            yield path, response.read()
    report = corral.root / "report.archive"
    corral.ok("report", "--output", str(report))
    yield "corral report", b"".join(_members(report))
    corral.ok("stop")
    yield "corral events", "\n".join(events).encode()
    for file in sorted(corral.root.rglob("*")):
        place = file.relative_to(corral.root)
        if file.is_file() and not _TEXTS_ON_PURPOSE.intersection(place.parts):
            yield str(place), file.read_bytes()


def _members(archive: Path) -> Iterator[bytes]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as members:
            yield from map(members.read, members.namelist())
        return
    with tarfile.open(archive) as members:
        for member in members:
            if file := members.extractfile(member):
                yield file.read()


if __name__ == "__main__":
    sys.exit(main())
