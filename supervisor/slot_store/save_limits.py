"""Limits of slot files: bytes per hour, pauses after failures, pending files, the budget.

Writes while engines serve are limited per hour, because each written byte wears flash memory.

Files beyond the budget are deleted, beginning with the least value per byte. The value of a file is
the number of tokens that it will probably save: its tokens and those lately restored from it, times
the probability that its conversation returns. That falls with the time since its latest use, as
most conversations that return do so soon. The value of a prefix is multiplied by the number of
conversations that begin with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from supervisor.slot_store.file_index import CataloguedFile
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.store import SlotStore
from supervisor.system.paths import file_name

_FIRST_S: Final = 60.0
_LAST_S: Final = 3600.0


class Pause:
    """Pauses after failures of a disk, which is tried and reported once per pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = float("-inf")
        self._length_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until_s

    def begin(self) -> float | None:
        """Begin a pause and return its seconds; None if one is running."""
        if self.is_on:
            return None
        self._length_s = min(_LAST_S, max(_FIRST_S, 2 * self._length_s))
        self._until_s = self._clock() + self._length_s
        return self._length_s

    def end(self) -> None:
        """Note a success; the next pause will be short."""
        self._length_s = 0.0


_HOUR_S: Final = 3600.0
_HOUR_MIN: Final = 60
# The weight of the latest file in the average.
_LATEST: Final = 0.3


@define(eq=False, slots=False)
class SaveLimits:
    """The limits of writes while engines serve, and the pause after a failure.

    A disk below `slow_bytes_per_s` is too slow: at 8 MiB/s, 2 000 tokens of an 8B model take 20 s.
    The time for less than `measured_min_bytes` says nothing about the rate.
    """

    _clock: Callable[[], float] = time.monotonic
    _slow_bytes_per_s: float = 8 * 1024**2
    _measured_min_bytes: int = 4 * 1024**2
    _spent_bytes: float = field(default=0.0, init=False)  # of the hour's budget, at `_spent_at_s`
    _rate_bytes: float | None = field(default=None, init=False)  # per second

    def __attrs_post_init__(self) -> None:
        self._spent_at_s = self._clock()
        self._written: defaultdict[int, float] = defaultdict(float)  # by minute
        self.pause = Pause(self._clock)

    @property
    def written_bytes(self) -> float:
        """Bytes written in the last hour, to the minute."""
        first = self._minute - _HOUR_MIN
        return sum(size_bytes for minute, size_bytes in self._written.items() if minute > first)

    @property
    def _minute(self) -> int:
        return int(self._clock() // 60)

    def may_write(self, size_bytes: float, hour_bytes: float) -> bool:
        """Return whether `size_bytes` may be written, with a budget of `hour_bytes` per hour."""
        return not self.pause.is_on and self._spent(hour_bytes) + size_bytes <= hour_bytes

    def note_written(self, size_bytes: float, hour_bytes: float) -> None:
        """Note a write, which may exceed the budget of the hour if it was necessary."""
        self._written[self._minute] += size_bytes
        while len(self._written) > _HOUR_MIN:
            del self._written[min(self._written)]
        spent_bytes = self._spent(hour_bytes) + size_bytes
        self._spent_bytes, self._spent_at_s = min(spent_bytes, 2 * hour_bytes), self._clock()

    def note_stored(self, size_bytes: float, duration_s: float) -> str:
        """Note the time of a write; return a clause if the disk is too slow, or an empty text."""
        if size_bytes < self._measured_min_bytes:
            self.pause.end()
            return ""
        rate_bytes = size_bytes / max(duration_s, 1e-6)
        before_bytes = rate_bytes if self._rate_bytes is None else self._rate_bytes
        self._rate_bytes = (1 - _LATEST) * before_bytes + _LATEST * rate_bytes
        if self._rate_bytes < self._slow_bytes_per_s:
            rate_mib, self._rate_bytes = self._rate_bytes / 1024**2, None
            return f"the disk stores {rate_mib:.1f} MiB a second"
        self.pause.end()
        return ""

    def _spent(self, hour_bytes: float) -> float:
        passed_s = self._clock() - self._spent_at_s
        return max(0.0, self._spent_bytes - hour_bytes * passed_s / _HOUR_S)


_FILES_MAX: Final = 32
# A single file may be larger.
_MAX_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """A file that an engine has written in `duration_s`."""

    path: Path
    unverified: Manifest
    duration_s: float
    store: SlotStore
    budget: DiskBudget


class PendingFiles:
    """Files that engines have written, each with the task that stores it."""

    def __init__(self) -> None:
        self._files: dict[asyncio.Task[Any], SpooledFile] = {}

    def add(self, spooled: SpooledFile, task: asyncio.Task[Any]) -> None:
        self._files[task] = spooled
        task.add_done_callback(self._files.pop)

    def __contains__(self, path: Path) -> bool:
        return any(pending.path == path for pending in self._files.values())

    def has_room(self, size_bytes: float) -> bool:
        """Return whether an engine may write a file of this size now."""
        held_bytes = sum(pending.unverified.size_bytes for pending in self._files.values())
        is_small = not held_bytes or held_bytes + size_bytes <= _MAX_BYTES
        return len(self._files) < _FILES_MAX and is_small

    async def settle(self, instance: str | None = None) -> None:
        """Wait until the files of an instance, or of all, are stored."""
        spool = None if instance is None else file_name(instance)
        waiting = [
            task
            for task, pending in self._files.items()
            if spool in {None, pending.path.parent.name}
        ]
        if waiting:
            await asyncio.wait(waiting)


# Half of the conversations that did not return in this time return within the same time again.
_RETURN_S: Final = 3600.0
# Restored tokens lose half their weight in a day.
_RESTORED_HALF_S: Final = 86_400.0

_Worth = Callable[[CataloguedFile], float]


def to_evict(
    kept: Collection[CataloguedFile], budget: DiskBudget, now: datetime
) -> list[CataloguedFile]:
    """Return the files to delete: the too old ones, then those of the least value per byte."""
    young = [entry for entry in kept if now - entry.manifest.used_at <= budget.max_age]
    fitting = _select_within_budget(young, budget, _worth(young, now))
    names = {entry.file.name for entry in fitting}
    return [entry for entry in kept if entry.file.name not in names]


def _select_within_budget(
    kept: list[CataloguedFile], budget: DiskBudget, worth: _Worth
) -> list[CataloguedFile]:
    by_model = groupby(sorted(kept, key=_model), key=_model)
    models = [
        _keep_best(list(found), budget.files_a_model, budget.model_bytes, worth)
        for _, found in by_model
    ]
    rest = [entry for found in models for entry in found]
    return _keep_best(rest, budget.files, budget.size_bytes, worth)


def _keep_best(
    kept: list[CataloguedFile], files: int, size_bytes: float, worth: _Worth
) -> list[CataloguedFile]:
    left_bytes = size_bytes - sum(entry.file.size_bytes for entry in kept)
    if left_bytes >= 0 and len(kept) <= files:
        return kept
    least_first = sorted(kept, key=worth)
    gone = max(0, len(kept) - files)
    left_bytes += sum(entry.file.size_bytes for entry in least_first[:gone])
    while left_bytes < 0:
        left_bytes += least_first[gone].file.size_bytes
        gone += 1
    return least_first[gone:]


def _worth(kept: Iterable[CataloguedFile], now: datetime) -> _Worth:
    """Return a function that computes the value of a file per byte."""
    conversations = _conversations(list(kept))

    def worth(entry: CataloguedFile) -> float:
        file, age_s = entry.file, max(0.0, (now - entry.manifest.used_at).total_seconds())
        restored: float = entry.restored_tokens * 0.5 ** (age_s / _RESTORED_HALF_S)
        return_p = _RETURN_S / (_RETURN_S + age_s)
        tokens = (file.tokens + restored) * (1 + conversations[file.name])
        return tokens * return_p / max(1, file.size_bytes)

    return worth


def _conversations(kept: Collection[CataloguedFile]) -> Counter[str]:
    """Return how many conversations begin with each prefix."""
    counts = Counter[str]()
    for prefix in (entry.file for entry in kept if not entry.file.fingerprint.turn_hashes):
        if blocks := prefix.fingerprint.blocks:
            end = len(blocks) - 1
            others = (
                entry.file.fingerprint.blocks
                for entry in kept
                if entry.file.cache_key == prefix.cache_key and entry.file is not prefix
            )
            counts[prefix.name] = sum(len(its) > end and its[end] == blocks[end] for its in others)
    return counts


_model = attrgetter("manifest.model")
