from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.plan import changed_values
from supervisor.daemon.control_messages import DaemonStatus, read
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import CORRAL, Setting, SettingsByFlag

ENTRY = ModelEntry("chat", Path("/models/chat.gguf"))
VALUE = {"key": "threads", "value": 1, "origin": "machine", "reason": "other programs"}
LESS = {"key": "ctx-size", "value": 4096, "origin": CORRAL, "reason": "the memory is full"}
NONE: tuple[SettingsByFlag, SettingsByFlag] = ({}, {})


NAMED = {"name": "chat", "path": "/models/chat.gguf", "profile": "base"}
STATUS: DaemonStatus = read(
    DaemonStatus, {"models": [{**NAMED, "adapted": [VALUE], "reduced": [LESS]}]}
)


def test_values_of_the_daemon_are_returned() -> None:
    adapted, reduced = changed_values(STATUS, ENTRY)
    assert adapted == {"threads": Setting(1, "machine", "other programs")}
    assert reduced == {"ctx-size": Setting(4096, "llama-corral", "the memory is full")}


def test_without_a_daemon_that_answers_there_are_none() -> None:
    assert changed_values(None, ENTRY) == NONE


@pytest.mark.parametrize(
    "changes", [{"name": "other"}, {"path": Path("/other.gguf")}, {"profile": "low-latency"}]
)
def test_values_of_another_model_are_not_taken(changes: dict[str, Any]) -> None:
    assert changed_values(STATUS, replace(ENTRY, **changes)) == NONE
