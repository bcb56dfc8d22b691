"""Values that a running daemon changed while it serves a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from supervisor.control.client import Client
from supervisor.control.messages import AdaptedValue, ModelStatus
from supervisor.errors import CorralError
from supervisor.flags.plan import ModelEntry
from supervisor.flags.setting import Setting, Settings


@dataclass(frozen=True, slots=True)
class ChangedValues:
    """What follows demand and load, and what was given up after the engine ran out of memory."""

    adapted: Settings
    reduced: Settings


def changed_values(socket: Path, entry: ModelEntry) -> ChangedValues:
    """Return the values with which the daemon would start a model now; none without a daemon.

    A daemon that serves another model by that name, or with another profile, says nothing of it.
    """
    try:
        models = Client(socket).status()["models"]
    except CorralError:
        models = []
    found = next((one for one in models if _is_same(one, entry)), None)
    adapted, reduced = (found["adapted"], found["reduced"]) if found else ([], [])
    return ChangedValues(_settings(adapted), _settings(reduced))


def _settings(values: list[AdaptedValue]) -> Settings:
    return {one["key"]: Setting(one["value"], one["origin"], one["reason"]) for one in values}


def _is_same(model: ModelStatus, entry: ModelEntry) -> bool:
    named = model["name"], model["path"], model["profile"]
    return named == (entry.name, str(entry.path), entry.profile)
