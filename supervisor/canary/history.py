"""Canaries that have ended, and what is said of each; kept across restarts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from supervisor.canary.canary import CanaryRequest, EndedCanary, Outcome
from supervisor.canary.record import ENDED_MAX, CanaryRecord
from supervisor.events import Emit

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
