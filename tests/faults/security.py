"""Clients that request forbidden things. 42 to 44."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from urllib.parse import quote

from faults.daemon_under_test import DaemonUnderTest
from faults.fault import Faults, Seen
from faults.wire import each, exchange, request, status, status_and_code, summary

SECURITY = Faults()

_NAMES = {
    "up": "../../etc/passwd",
    "an option": "--model",
    "NUL": "m\0",
    "dots": "\N{ONE DOT LEADER}\N{ONE DOT LEADER}/m",
    "long": "m" * 300,
    "a URL": "http://evil.example/m",
    "a line": "m\r\nX-Evil: 1",
}


@SECURITY.add(42, "model names that are paths or options")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    before = _files(target)
    answers = each(
        target, {name: request("/tokenize", {"model": bad}) for name, bad in _NAMES.items()}
    )
    yield "all 404 model_not_found", summary(answers)
    paths = each(
        target, {name: request(f"/v1/models/{quote(bad)}") for name, bad in _NAMES.items()}
    )
    kinds = {answer[:3] for answer in paths}
    yield (
        "as a path: never answered",
        f"as a path: {'never answered' if '200' not in kinds else paths}",
    )
    target.corral.configure(f'[models."../m"]\npath = "{target.models.tiny}"')
    failed = target.corral("reload")
    yield "in the settings: exits with 78", f"in the settings: exits with {failed.returncode}"
    yield (
        "no file more",
        "no file more" if _files(target) == before else str(_files(target) - before),
    )


def _files(target: DaemonUnderTest) -> set[Path]:
    return {path for path in target.root.rglob("*") if path.name != "corral.toml"}


@SECURITY.add(43, "foreign pages, foreign names, and the control socket")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    body = b'{"content": "a"}'
    cases = {
        "rebound Host": request("/tokenize", body, host="evil.example"),
        "foreign Origin": request("/tokenize", body, "Origin: https://evil.example"),
        "no Origin worth a name": request("/tokenize", body, "Origin: null"),
        "a simple POST": request(
            "/tokenize", body, "Origin: https://evil.example", "Content-Type: text/plain"
        ),
        "a rebound look": request("/v1/models", host="evil.example:80"),
    }
    yield "all 403 forbidden", summary(each(target, cases))
    ours = request("/tokenize", body, "Origin: tauri://localhost")
    yield "a desktop application: 200", f"a desktop application: {status(exchange(target, ours))}"
    control = target.root / "run" / "control.sock"
    mode = stat.S_IMODE(control.stat().st_mode) | stat.S_IMODE(control.parent.stat().st_mode)
    yield "control: ours alone", f"control: {'ours alone' if not mode & 0o077 else f'{mode:o}'}"
    yield (
        "control over TCP: 404 not_found",
        f"control over TCP: {status_and_code(exchange(target, request('/stop', b'{}')))}",
    )


@SECURITY.add(43, "API keys: none, a wrong one, two; and one at its limits")
def _(target: DaemonUnderTest) -> Seen:
    target.configure(
        {"m": target.models.tiny}, '[proxy]\nlisten = "127.0.0.1:0"\napi_keys_file = "keys.toml"'
    )
    words = ("key", "add", "me", "--rpm", "2", "--model", "m")
    key = target.corral.data(*words)["key"]
    target.corral.ok("start")
    cases = {
        "none": request("/v1/models"),
        "wrong": request("/v1/models", None, "Authorization: Bearer corral-wrong"),
        "two": request("/v1/models", None, f"Authorization: Bearer {key}", "X-Api-Key: other"),
    }
    yield "all 401 invalid_api_key", summary(each(target, cases))
    mine = request("/v1/models", None, f"X-Api-Key: {key}")
    seen = [status_and_code(exchange(target, mine)) for _ in range(3)]
    yield "200, 200, 429 rate_limit_exceeded", ", ".join(seen)
    yield "health: 200", f"health: {status(exchange(target, request('/health')))}"
    kept = [
        path
        for path in target.root.rglob("*")
        if path.is_file() and key.encode() in path.read_bytes()
    ]
    yield "the key is written nowhere", f"the key is written {kept or 'nowhere'}"
    (target.root / "config" / "keys.toml").chmod(0o644)
    target.corral.ok("stop")
    yield (
        "open to others: exits with 78",
        f"open to others: exits with {target.corral('start').returncode}",
    )


@SECURITY.add(44, "members a client may not set, and text forged for the log", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    chat = {
        "model": "m",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "a"}],
        "id_slot": 999,
        "lora": [],
    }
    fields = ("X-Conversation-Id: c1", "X-Corral-Instance: other", "X-Request-Id: a b")
    answer = exchange(target, request("/v1/chat/completions", chat, *fields))
    yield "a slot that is not there: 200", f"a slot that is not there: {status(answer)}"
    cases = {
        path: request(path, b"{}") for path in ("/slots/0?action=save", "/props", "/lora-adapters")
    }
    refused = {answer[:3] for answer in each(target, cases)}
    yield "changes: refused", f"changes: {'refused' if refused <= {'404', '405'} else refused}"
    look = status(exchange(target, request("/v1/stream?conv_id=c1")))
    yield "another's stream: 404", f"another's stream: {look}"
    evil = 'm"\n{"event": "daemon.stopped"}\r\n\x1b[2J'
    exchange(target, request("/tokenize", {"model": evil}, 'X-Request-Id: "}, {"a": "b'))
    lines = (target.root / "log" / "daemon.log").read_text("utf-8").splitlines()
    forged = [
        line for line in lines if line.startswith('{"event": "daemon.stopped"}') or "\x1b" in line
    ]
    yield "no line forged", "no line forged" if not forged else str(forged)
    events = [json.loads(line) for line in lines if line.startswith("{")]
    yield "logged as one", "logged as one" if _refusals(events) == 1 else str(events[-3:])


def _refusals(events: list[dict[str, object]]) -> int:
    return sum("daemon.stopped" in str(event.get("reason")) for event in events)
