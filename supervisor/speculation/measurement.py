"""Weighs what guessing tokens ahead brings in one run of an engine, while that serves.

What a guess costs is measured once, when nobody asks anything of the engine; a request that comes
in ends that, and it is begun anew later, some times at most. How many guesses come true is read
from the engine's own counters, whenever answers came from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.speculation.benefit import (
    SpeculationBenefit,
    SpeculationConfig,
    SpeculationCost,
    SpeculationStats,
    Tokens,
    estimate_benefit,
)
from supervisor.speculation.trial import measure
from supervisor.warmup.background import BackgroundLeases, LeaseUnavailable, run_until_preempted

_TRIES_MAX: Final = 5

Tell = Callable[[SpeculationBenefit], None]


class SpeculationMeasurement:
    """What guessing brings in one run.

    Args:
        drafting: How the engine guesses; None where it does not.
        tell: Told the first verdict, and each that is another than the one before.
    """

    def __init__(self, drafting: SpeculationConfig | None, tell: Tell) -> None:
        self._drafting = drafting
        self._tell = tell
        self._tries = 0
        self._costs: SpeculationCost | None = None
        self._ours = Tokens()
        self._judged = Tokens()
        self._heard = 0
        self._tokens = Tokens()
        self._verdict: SpeculationBenefit | None = None

    @property
    def drafts(self) -> SpeculationStats | None:
        """Return what is known so far; None where the engine does not guess."""
        return SpeculationStats(self._tokens, self._verdict) if self._drafting else None

    async def go_on(
        self, client: EngineClient, traffic: BackgroundLeases, name: str, every_s: float
    ) -> None:
        """Weigh until cancelled.

        Args:
            client: The engine, which serves.
            traffic: Who lends the instance, and asks it back.
            name: The instance.
            every_s: Seconds between looks at its counters, where there is anything new.
        """
        while self._drafting:
            if (
                not self._costs
                and self._tries < _TRIES_MAX
                and not traffic.activity(name).in_flight
            ):
                self._tries += 1
                with suppress(LeaseUnavailable):
                    async with traffic.background_lease(name) as is_wanted:
                        await run_until_preempted(self._measure(client, self._drafting), is_wanted)
            if self._heard != (heard := traffic.activity(name).bytes_seen):
                self._heard = heard
                await self._look(client, self._drafting)
            await asyncio.sleep(every_s)

    async def _measure(self, client: EngineClient, drafting: SpeculationConfig) -> None:
        with suppress(EngineUnreachable):  # whoever watches the engine finds out
            self._costs = await measure(client, drafting, self._spend)

    async def _look(self, client: EngineClient, drafting: SpeculationConfig) -> None:
        try:
            found = await client.metrics()
        except EngineUnreachable:
            return
        if not isinstance(found, ErrorResponse):
            self._weigh(drafting, _tokens(found))

    def _spend(self, tokens: Tokens) -> None:
        self._ours += tokens

    def _weigh(self, drafting: SpeculationConfig, counted: Tokens) -> None:
        """Take in what the engine has counted; those answers are left aside that were for us."""
        self._tokens = counted - self._ours
        if not self._costs:
            return
        verdict = estimate_benefit(drafting, self._costs, self._tokens - self._judged)
        if verdict is None:
            return
        before, self._verdict, self._judged = self._verdict, verdict, self._tokens
        if before is None or before.is_slower is not verdict.is_slower:
            self._tell(verdict)


def _tokens(metrics: Mapping[str, float]) -> Tokens:
    names = (
        "tokens_predicted_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    )
    return Tokens(*(int(metrics.get(name, 0)) for name in names))
