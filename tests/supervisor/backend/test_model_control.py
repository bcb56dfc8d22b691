"""The actions on models that clients of the proxy may take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.errors import ModelFailed, UnknownModel
from supervisor.backend.models import LocalModels
from supervisor.errors import NoSuchModel
from supervisor.events import EventStream


class Admission:
    def __init__(self) -> None:
        self.commands: list[tuple[str, list[str]]] = []

    def command(self, verb: str, names: list[str]) -> None:
        if names == ["gone"]:
            raise NoSuchModel("it is gone")
        self.commands.append((verb, names))


def adapter(admission: Admission, events: EventStream) -> LocalModels:
    stopped = SimpleNamespace(
        is_open=False, refusal=None, entry=SimpleNamespace(name="stopped", path=Path("x"))
    )
    served = {"chat": SimpleNamespace(is_open=True), "stopped": stopped}
    fleet = cast("Any", SimpleNamespace(models=served))
    models = LocalModels(fleet, cast("Any", admission), events)
    events.add_sink(models.observe)
    return models


def test_models_are_loaded_and_unloaded_as_by_command() -> None:
    admission, emitted = Admission(), list[tuple[str, object]]()
    events = EventStream(lambda event: emitted.append((event.name, event.fields["model"])))
    control = adapter(admission, events)
    control.load("chat")
    control.unload("chat")
    control.unload("stopped")
    assert admission.commands == [
        ("load", ["chat"]),
        ("unload", ["chat"]),
        ("unload", ["stopped"]),
    ]
    assert emitted == [("model.unloaded", "chat"), ("model.unloaded", "stopped")]
    with pytest.raises(ModelFailed, match="corral start stopped"):
        control.load("stopped")
    with pytest.raises(UnknownModel):
        control.unload("gone")


def test_changes_are_told_while_someone_listens() -> None:
    events = EventStream()
    control = adapter(Admission(), events)
    with control.changes() as first, control.changes() as second:
        events.emit("batches.resumed")
        assert not first.is_set()
        events.emit("model.unloaded", model="chat", reason="by request")
        assert first.is_set()
        assert second.is_set()
        first.clear()
    events.emit("model.unloaded", model="chat", reason="by request")
    assert not first.is_set()
