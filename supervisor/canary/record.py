"""What is known of canaries after a restart of the daemon, which ends those that ran."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from supervisor.canary.canary import CanaryRequest, EndedCanary, Outcome
from supervisor.host import json_cache

_KEY: Final = "canaries"
ENDED_MAX: Final = 16


class CanaryRecord:
    """One file below `root` for this user alone; one that cannot be used counts as missing."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, running: Iterable[CanaryRequest], ended: Iterable[EndedCanary]) -> None:
        value = {
            "running": [{"model": one.model, "engine": str(one.engine)} for one in running],
            "ended": [asdict(one) for one in ended],
        }
        json_cache.put(self._root, _KEY, value)

    def read(self) -> tuple[list[tuple[str, str]], list[EndedCanary]]:
        """Return model and engine of those that ran, and those that had ended."""
        found = json_cache.get(self._root, _KEY) or {}
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            running = [(str(one["model"]), str(one["engine"])) for one in found["running"]]
            return running, [_ended(one) for one in found["ended"][-ENDED_MAX:]]
        return [], []


def _ended(found: dict[str, Any]) -> EndedCanary:
    outcome: Outcome = "promoted" if found["outcome"] == "promoted" else "withdrawn"
    model, engine, reason, at = (str(found[name]) for name in ("model", "engine", "reason", "at"))
    return EndedCanary(model, engine, outcome, reason, at)
