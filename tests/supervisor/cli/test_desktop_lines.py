"""The lines that a host gets for the daemon's events."""

from typing import Any

import pytest

from supervisor.cli.desktop_host import event_lines, state_lines
from supervisor.daemon.control_messages import DaemonStatus, read
from supervisor.events import EVENTS

FAILED = {
    "instance": "chat.0",
    "model": "chat",
    "failures": 5,
    "code": "no_room",
    "reason": "out of memory",
    "hint": "use a smaller model",
    "log": "/log/chat.0.log",
}


def lines(name: str, **fields: Any) -> list[dict[str, object]]:
    level, known = EVENTS[name]
    assert fields.keys() <= set(known)
    return list(event_lines({"name": name, "level": level, "at": "", "fields": fields}))


def test_a_failed_instance_is_an_error_with_code_hint_and_log() -> None:
    assert lines("instance.failed", **FAILED) == [
        {
            "event": "error",
            "code": "no_room",
            "message": "out of memory",
            "hint": "use a smaller model",
            "log": "/log/chat.0.log",
            "model": "chat",
            "instance": "chat.0",
        }
    ]


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("model.load_refused", {"model": "chat", "reason": "no memory"}, "load_refused"),
        ("settings.rejected", {"reason": "not TOML"}, "settings_invalid"),
        ("task.failed", {"error": "KeyError"}, "internal_error"),
    ],
)
def test_other_failures_have_codes_too(name: str, fields: dict[str, str], code: str) -> None:
    (line,) = lines(name, **fields)
    assert (line["event"], line["code"]) == ("error", code)
    assert line["message"]


def test_what_a_host_does_not_act_on_is_no_line() -> None:
    assert lines("slots.saved", model="chat") == []


def test_a_failure_before_the_host_joined_is_told_with_the_state() -> None:
    error = {"code": "no_room", "message": "m", "hint": None, "log": None}
    instance = {"name": "chat.0", "state": "failed", "error": error}
    status = {"models": [{"name": "chat", "instances": [instance]}]}
    found = list(state_lines(read(DaemonStatus, status)))
    names = {"model": "chat", "instance": "chat.0"}
    assert found == [
        {"event": "state", **names, "state": "failed", "reason": "no_room"},
        {"event": "error", **error, **names},
    ]
