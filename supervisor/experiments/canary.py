"""Canaries: the request for one, the state of a running one, their history, and their trials."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from supervisor.builds.installed import EngineSetting
from supervisor.events import Emit
from supervisor.plan.plan import CanaryTrial
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.system import files

Outcome = Literal["promoted", "withdrawn"]


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """A canary to start for a share of new conversations, above 0 and below 1.

    After `limit_s` it is promoted or withdrawn; None leaves that to commands. `margin` is how much
    slower it may be: 0.1 for a tenth.
    """

    model: str
    engine: EngineSetting
    share: float
    limit_s: float | None
    margin: float

    @property
    def trial(self) -> CanaryTrial:
        return CanaryTrial(engine=self.engine, share=self.share)


@dataclass(frozen=True, slots=True)
class EndedCanary:
    """`at` is ISO 8601 in UTC."""

    model: str
    engine: str
    outcome: Outcome
    reason: str
    at: str


@dataclass(slots=True)
class Canary:
    """A running canary; `obstacle` is why its promotion was refused, so that it awaits a command.

    `decides_at_s` is monotonic; None for by command only.
    """

    request: CanaryRequest
    decides_at_s: float | None
    obstacle: str | None = None


_KEY: Final = "canaries"
ENDED_MAX: Final = 16


class CanaryRecord:
    """One file below `root`, readable by this user alone; an unusable file counts as missing."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, running: Iterable[CanaryRequest], ended: Iterable[EndedCanary]) -> None:
        value = {
            "running": [
                {"model": canary.model, "engine": str(canary.engine)} for canary in running
            ],
            "ended": [asdict(canary) for canary in ended],
        }
        files.put(self._root, _KEY, value)

    def read(self) -> tuple[list[tuple[str, str]], list[EndedCanary]]:
        """Return model and engine of the running canaries, and the ended ones."""
        found = files.get(self._root, _KEY) or {}
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            running = [(str(canary["model"]), str(canary["engine"])) for canary in found["running"]]
            return running, [_parse_ended_canary(canary) for canary in found["ended"][-ENDED_MAX:]]
        return [], []


def _parse_ended_canary(found: dict[str, Any]) -> EndedCanary:
    outcome: Outcome = "promoted" if found["outcome"] == "promoted" else "withdrawn"
    model, engine, reason, at = (str(found[name]) for name in ("model", "engine", "reason", "at"))
    return EndedCanary(model, engine, outcome, reason, at)


RESTARTED: Final = "the daemon was restarted"


class CanaryHistory:
    """The latest 16 canaries that ended; `record` keeps them and the running ones."""

    def __init__(self, record: CanaryRecord, emit: Emit) -> None:
        self._record = record
        self._emit = emit
        self._ended: deque[EndedCanary] = deque(maxlen=ENDED_MAX)

    @property
    def ended_canaries(self) -> tuple[EndedCanary, ...]:
        """The latest last."""
        return tuple(self._ended)

    async def end_interrupted(self) -> None:
        """Withdraw the canaries that ran when the last daemon ended."""
        running, ended = await asyncio.to_thread(self._record.read)
        self._ended.extend(ended)
        for model, engine in running:
            self.add(model, engine, "withdrawn", RESTARTED)
        if running:
            await self.save([])

    def add(self, model: str, engine: str, outcome: Outcome, reason: str) -> None:
        at = datetime.now(tz=UTC).isoformat(timespec="seconds")
        self._ended.append(EndedCanary(model, engine, outcome, reason, at))
        if outcome == "promoted":
            self._emit("canary.promoted", model=model, engine=engine, reason=reason)
        else:
            self._emit("canary.withdrawn", model=model, engine=engine, reason=reason)

    async def save(self, running: Iterable[CanaryRequest]) -> None:
        await asyncio.to_thread(self._record.save, tuple(running), self.ended_canaries)


class CanaryTrials:
    def __init__(self) -> None:
        self._trials: dict[str, CanaryTrial] = {}

    def set(self, model: str, trial: CanaryTrial) -> None:
        self._trials[model] = trial

    def remove(self, model: str) -> None:
        self._trials.pop(model, None)

    def apply(self, settings: Settings) -> Settings:
        """Return settings with the canaries' trials on the models that can have one."""
        changed = {
            name: model.model_copy(update={"trial": self._trials[name]})
            for name, model in settings.models.items()
            if name in self._trials and can_have_canary(model)
        }
        if not changed:
            return settings
        return settings.model_copy(update={"models": {**settings.models, **changed}})


def can_have_canary(model: ModelSettings) -> bool:
    """Whether a model has neither a trial, which needs one more replica, nor RPC workers."""
    return model.trial is None and not model.workers
