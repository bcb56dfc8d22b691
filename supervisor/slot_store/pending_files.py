"""Files that engines have written and that are not stored yet. Bounded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.host.paths import file_name
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.store import SlotStore

_FILES_MAX: Final = 32
# A single file may be larger.
_MAX_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """A file that an engine has written, for `duration_s`."""

    path: Path
    unverified: Manifest
    duration_s: float
    store: SlotStore
    budget: DiskBudget


class PendingFiles:
    """Each with the task that stores it."""

    def __init__(self) -> None:
        self._files: dict[asyncio.Task[Any], SpooledFile] = {}

    def add(self, spooled: SpooledFile, task: asyncio.Task[Any]) -> None:
        self._files[task] = spooled
        task.add_done_callback(self._files.pop)

    def __contains__(self, path: Path) -> bool:
        return any(one.path == path for one in self._files.values())

    def has_room(self, size_bytes: float) -> bool:
        """Return whether an engine may write a file of this size now."""
        held_bytes = sum(one.unverified.size_bytes for one in self._files.values())
        is_small = not held_bytes or held_bytes + size_bytes <= _MAX_BYTES
        return len(self._files) < _FILES_MAX and is_small

    async def settle(self, instance: str | None = None) -> None:
        """Wait until the files of an instance, or of all, are stored."""
        spool = None if instance is None else file_name(instance)
        waiting = [
            task for task, one in self._files.items() if spool in {None, one.path.parent.name}
        ]
        if waiting:
            await asyncio.wait(waiting)
