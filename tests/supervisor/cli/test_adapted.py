from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import plan
from supervisor.cli.plan import read_changed_values
from supervisor.daemon.control_messages import DaemonStatus, read
from supervisor.errors import DaemonBusy, NotRunning
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import CORRAL, Setting, SettingsByFlag

ENTRY = ModelEntry("chat", Path("/models/chat.gguf"))
VALUE = {"key": "threads", "value": 1, "origin": "machine", "reason": "other programs"}
LESS = {"key": "ctx-size", "value": 4096, "origin": CORRAL, "reason": "the memory is full"}
NONE: tuple[SettingsByFlag, SettingsByFlag] = ({}, {})


@pytest.fixture(autouse=True)
def daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"name": "chat", "path": "/models/chat.gguf", "profile": "base"}

    class Client:
        def __init__(self, socket: Path) -> None:
            self.socket = socket

        def status(self) -> DaemonStatus:
            if self.socket.name == "none":
                raise NotRunning("no daemon")
            if self.socket.name == "busy":
                raise DaemonBusy("it does not answer")
            model = {**named, "adapted": [VALUE], "reduced": [LESS]}
            found: DaemonStatus = read(DaemonStatus, {"models": [model]})
            return found

    monkeypatch.setattr(plan, "Client", Client)


def test_values_of_the_daemon_are_returned() -> None:
    adapted, reduced = read_changed_values(Path("socket"), ENTRY)
    assert adapted == {"threads": Setting(1, "machine", "other programs")}
    assert reduced == {"ctx-size": Setting(4096, "llama-corral", "the memory is full")}


@pytest.mark.parametrize("socket", ["none", "busy"])
def test_without_a_daemon_that_answers_there_are_none(socket: str) -> None:
    assert read_changed_values(Path(socket), ENTRY) == NONE


@pytest.mark.parametrize(
    "changes", [{"name": "other"}, {"path": Path("/other.gguf")}, {"profile": "low-latency"}]
)
def test_values_of_another_model_are_not_taken(changes: dict[str, Any]) -> None:
    assert read_changed_values(Path("socket"), replace(ENTRY, **changes)) == NONE
