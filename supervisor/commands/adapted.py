"""Values that a running daemon adapted while it serves a model."""

from __future__ import annotations

from pathlib import Path

from supervisor.control.client import Client
from supervisor.control.messages import ModelStatus
from supervisor.errors import CorralError
from supervisor.flags.plan import ModelEntry
from supervisor.flags.setting import Setting, Settings


def adapted_values(socket: Path, entry: ModelEntry) -> Settings:
    """Return the values with which the daemon would start a model now; none without a daemon.

    A daemon that serves another model by that name, or with another profile, says nothing of it.
    """
    try:
        models = Client(socket).status()["models"]
    except CorralError:
        return {}
    found = next((one for one in models if _is_same(one, entry)), None)
    values = found["adapted"] if found else []
    return {one["key"]: Setting(one["value"], one["origin"], one["reason"]) for one in values}


def _is_same(model: ModelStatus, entry: ModelEntry) -> bool:
    named = model["name"], model["path"], model["profile"]
    return named == (entry.name, str(entry.path), entry.profile)
