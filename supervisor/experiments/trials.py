"""The trials of all models: attributes events to their sides, and keeps their figures.

Figures are saved so that they outlast a restart of the daemon: numbers only, one file for each pair
of sides, readable by this user alone. A file that was altered or cannot be used counts as missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.engine.states import State
from supervisor.events import Event, Part
from supervisor.experiments.verdict import FIGURES, SIDES, Side, SideName, TrialFigures, Value
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import LaunchFingerprint
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.stats import OtherRequests
from supervisor.system import files
from supervisor.system.paths import is_ours

_FILES_MAX: Final = 64
_DIGITS: Final = 4
_COUNTS: Final = ("requests", "errors", "crashes", "others")
_NUMBER_MAX: Final = 2**53


def key_of(model: str, sides: Iterable[LaunchFingerprint]) -> str:
    """Name a trial's file by a hash of its model and of both sides' launches."""
    parts = []
    for side in sides:
        flags = sorted(side.flags.items())
        launch = (side.engine, side.library_dirs, side.model, side.draft, flags, side.args)
        parts.append(repr(launch))
    return hashlib.sha256("\n".join((model, *parts)).encode()).hexdigest()[:32]


def read(root: Path, key: str) -> tuple[float, TrialFigures] | None:
    """Return how long a trial was observed, in seconds, and its figures."""
    found = files.get(root, key)
    with suppress(TypeError, ValueError, LookupError, AttributeError):
        return (_number(found["age_s"]), _figures(found)) if found else None
    return None


def content(age_s: float, figures: TrialFigures) -> dict[str, Any]:
    """Return the content of a trial's file, for `read`."""
    return {"age_s": round(age_s), **{name: _encode_side(figures.sides[name]) for name in SIDES}}


def _encode_side(side: Side) -> dict[str, Any]:
    conversations = [
        [*(_round(found.values[name]) for name in FIGURES), found.is_excluded]
        for found in side.conversations.values()
    ]
    return {**{name: getattr(side, name) for name in _COUNTS}, "conversations": conversations}


def _round(values: Iterable[Value]) -> list[Value]:
    return [(float(f"{value:.{_DIGITS}g}"), others) for value, others in values]


def _figures(found: Mapping[str, Any]) -> TrialFigures:
    figures = TrialFigures()
    for name, side in figures.sides.items():
        for count in _COUNTS:
            setattr(side, count, int(_number(found[name][count])))
        for number, (*lists, is_excluded) in enumerate(found[name]["conversations"]):
            # No conversation of this daemon has such a name: their numbers begin at 1 again.
            conversation = side.latest(f"before {number}")
            for figure, values in zip(FIGURES, lists, strict=True):
                conversation.values[figure].extend(
                    (_number(value), int(_number(others))) for value, others in values
                )
            conversation.is_excluded = bool(is_excluded)
    return figures


def _number(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and 0 <= number <= _NUMBER_MAX):
        raise ValueError(f"{number} is no figure")
    return number


_READY: Final = State.READY.value
# Newer figures are lost if the daemon is killed.
_SAVE_EVERY_S: Final = 60.0
_FAILED_MAX: Final = 256

Clock = Callable[[], float]
Sides = tuple[LaunchFingerprint | None, LaunchFingerprint | None]


@dataclass(slots=True)
class Trial:
    """The observations of one trial.

    `sides` are the launches of both sides, and other launches begin new figures; `key` names the
    file once both are known. `failed` has the side that failed each unfinished request.
    """

    began_at_s: float
    sides: Sides = (None, None)
    figures: TrialFigures = field(default_factory=TrialFigures)
    key: str | None = None
    saved_requests: int = 0
    failed: OrderedDict[str, SideName] = field(default_factory=OrderedDict)

    @property
    def requests(self) -> int:
        return sum(side.requests for side in self.figures.sides.values())


class Trials(Part):
    """Observes events; saves figures below `root`. `in_flight` counts an instance's requests."""

    task = "trials"

    def __init__(
        self,
        fleet: Fleet,
        in_flight: Callable[[str], int],
        root: Path,
        clock: Clock = time.monotonic,
        is_ready: Callable[[Replica], bool] | None = None,
    ) -> None:
        self._is_ready = is_ready or _is_ready
        self._fleet = fleet
        self._root = root
        self._others = OtherRequests(in_flight, clock)
        self._clock = clock
        self._trials: dict[str, Trial] = {}

    def observe(self, event: Event) -> None:
        """Count the events that concern a trial."""
        fields: Mapping[str, Any] = event.fields
        match event.name:
            case "request.finished":
                self._count_finished(fields)
            case "upstream.failed":
                self._note_failure(fields)
            case "instance.exited" if fields["fault"]:
                if found := self._side(fields["model"], fields["instance"]):
                    trial, side = found
                    trial.figures.sides[side].crashes += 1
            case "instance.state_changed" if fields["after"] == _READY:
                self.of(str(fields["model"]))

    def of(self, model: str) -> Trial | None:
        """Return the trial of a model; a new one if its settings have changed."""
        sides = self._sides(model)
        trial = self._trials.get(model)
        if trial and (sides is None or _differ(trial.sides, sides)):
            self._forget(model, trial)
            trial = None
        if sides is None:
            return None
        trial = trial or self._trials.setdefault(model, Trial(self._clock()))
        base, tried = trial.sides = (sides[0] or trial.sides[0], sides[1] or trial.sides[1])
        if trial.key is None and base and tried:
            self._resume(trial, key_of(model, (base, tried)))
        return trial

    def begin_again(self, model: str) -> None:
        """Forget a trial's observations, also those of earlier daemons."""
        if trial := self.of(model):
            self._forget(model, trial)

    async def serve(self) -> None:
        """Save new figures each minute until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(_SAVE_EVERY_S)
                await asyncio.to_thread(self._save, self._unsaved())
        finally:
            self._save(self._unsaved())

    def _unsaved(self) -> dict[str, dict[str, Any]]:
        found = {}
        for trial in self._trials.values():
            if trial.key and trial.requests != trial.saved_requests:
                trial.saved_requests = trial.requests
                found[trial.key] = content(self.age_s(trial), trial.figures)
        return found

    def _save(self, contents: Mapping[str, Mapping[str, Any]]) -> None:
        """Write files; errors of the disk are ignored."""
        for key, value in contents.items():
            files.put(self._root, key, value)
            with suppress(OSError):
                found = self._root.glob("*.json")
                for path in sorted(found, key=lambda path: path.stat().st_mtime)[:-_FILES_MAX]:
                    path.unlink()

    def _resume(self, trial: Trial, key: str) -> None:
        """Continue the figures of an earlier daemon, unless requests were observed already."""
        trial.key = key
        found = read(self._root, key)
        if found and not trial.requests:
            age_s, trial.figures = found
            trial.began_at_s = self._clock() - age_s
            trial.saved_requests = trial.requests

    def _forget(self, model: str, trial: Trial) -> None:
        del self._trials[model]
        if trial.key and is_ours(self._root):
            with suppress(OSError):
                (self._root / f"{trial.key}.json").unlink()

    def _sides(self, model: str) -> Sides | None:
        """Return the launches of both sides, or None for a model without a trial."""
        planner, found = self._fleet.planner, self._fleet.models.get(model)
        if not found or model not in planner.entries or planner.trial(model) is None:
            return None
        replicas = replicas_by_side(found)
        if not replicas["trial"]:
            return None
        base, trial = (
            next((replica.fingerprint for replica in replicas[name] if replica.fingerprint), None)
            for name in SIDES
        )
        return base, trial

    def age_s(self, trial: Trial) -> float:
        return self._clock() - trial.began_at_s

    def _count_finished(self, fields: Mapping[str, Any]) -> None:
        name = fields["instance"]
        if found := self._side(fields["model"], name):
            trial, side = found
            failed = trial.failed.pop(str(fields["request"]), None)
            if failed and failed != side:
                trial.figures.count_failure(failed)
            others = self._others.count(name, fields)
            # The figures of one side while the other cannot serve compare to nothing.
            sides = replicas_by_side(self._fleet.models[fields["model"]]).values()
            is_fair = all(any(map(self._is_ready, replicas)) for replicas in sides)
            trial.figures.count_request(side, fields, others, self._clock(), is_fair=is_fair)

    def _note_failure(self, fields: Mapping[str, Any]) -> None:
        if fields["model"] and (found := self._side(fields["model"], fields["instance"])):
            trial, side = found
            trial.failed[str(fields["request"])] = side
            if len(trial.failed) > _FAILED_MAX:
                trial.failed.popitem(last=False)

    def _side(self, model: str, instance: str) -> tuple[Trial, SideName] | None:
        """Return the trial that an instance belongs to, and its side."""
        trial = self.of(model)
        if trial is None:
            return None
        for replica in self._fleet.models[model].replicas:
            if replica.name == instance:
                return trial, side_of(replica)
        return None


def _is_ready(replica: Replica) -> bool:
    return replica.instance.snapshot().state is State.READY


def side_of(replica: Replica) -> SideName:
    return "trial" if replica.planner.trial_at(replica.place) else "base"


def replicas_by_side(model: Model) -> dict[SideName, list[Replica]]:
    found: dict[SideName, list[Replica]] = {"base": [], "trial": []}
    for replica in model.replicas:
        found[side_of(replica)].append(replica)
    return found


def _differ(before: Sides, now: Sides) -> bool:
    return any(old and new and old != new for old, new in zip(before, now, strict=True))
