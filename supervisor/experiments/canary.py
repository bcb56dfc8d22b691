"""A canary: what was asked for, what is known of it, and how it lies over the settings."""

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
    """A canary to start.

    Attributes:
        share: Of new conversations, above 0 and below 1.
        limit_s: After which it is promoted or withdrawn; None: by command only.
        margin: How much slower it may be, as a share: 0.1 for a tenth.
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
    """A canary that runs.

    Attributes:
        decides_at_s: Monotonic; None: by command only.
        obstacle: Why it was not promoted although it may be; it then waits for a command.
    """

    request: CanaryRequest
    decides_at_s: float | None
    obstacle: str | None = None


_KEY: Final = "canaries"
ENDED_MAX: Final = 16


class CanaryRecord:
    """One file below `root` for this user alone; one that cannot be used counts as missing."""

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
        """Return model and engine of those that ran, and those that had ended."""
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
    """The latest 16 that have ended; `record` keeps them and what runs."""

    def __init__(self, record: CanaryRecord, emit: Emit) -> None:
        self._record = record
        self._emit = emit
        self._ended: deque[EndedCanary] = deque(maxlen=ENDED_MAX)

    @property
    def ended(self) -> tuple[EndedCanary, ...]:
        """The latest last."""
        return tuple(self._ended)

    async def end_interrupted(self) -> None:
        """Say of canaries that ran when the last daemon ended that they are withdrawn."""
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
        await asyncio.to_thread(self._record.save, tuple(running), self.ended)


class CanaryTrials:
    """The trials of canaries by model."""

    def __init__(self) -> None:
        self._trials: dict[str, CanaryTrial] = {}

    def set(self, model: str, trial: CanaryTrial) -> None:
        self._trials[model] = trial

    def remove(self, model: str) -> None:
        self._trials.pop(model, None)

    def laid_on(self, settings: Settings) -> Settings:
        """Return settings with the canaries of those models that can have one."""
        changed = {
            name: model.model_copy(update={"trial": self._trials[name]})
            for name, model in settings.models.items()
            if name in self._trials and can_have_canary(model)
        }
        if not changed:
            return settings
        return settings.model_copy(update={"models": {**settings.models, **changed}})


def can_have_canary(model: ModelSettings) -> bool:
    """Whether a model has neither a trial, which is one replica more, nor RPC workers."""
    return model.trial is None and not model.workers
