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

from supervisor.life.draft import Costs, Drafting, Drafts, Tokens, Verdict, judge
from supervisor.life.idle import finish
from supervisor.life.llama import EngineSilent, Llama, Refused
from supervisor.life.traffic import NotLent, Traffic
from supervisor.life.trial import measure

_TRIES_MAX: Final = 5

Tell = Callable[[Verdict], None]


class Weighing:
    """What guessing brings in one run.

    Args:
        drafting: How the engine guesses; None where it does not.
        tell: Told the first verdict, and each that is another than the one before.
    """

    def __init__(self, drafting: Drafting | None, tell: Tell) -> None:
        self._drafting = drafting
        self._tell = tell
        self._tries = 0
        self._costs: Costs | None = None
        self._ours = Tokens()
        self._judged = Tokens()
        self._heard = 0
        self._tokens = Tokens()
        self._verdict: Verdict | None = None

    @property
    def drafts(self) -> Drafts | None:
        """Return what is known so far; None where the engine does not guess."""
        return Drafts(self._tokens, self._verdict) if self._drafting else None

    async def go_on(self, llama: Llama, traffic: Traffic, name: str, every_s: float) -> None:
        """Weigh until cancelled.

        Args:
            llama: The engine, which serves.
            traffic: Who lends the instance, and asks it back.
            name: The instance.
            every_s: Seconds between looks at its counters, where there is anything new.
        """
        while self._drafting:
            if not self._costs and self._tries < _TRIES_MAX and not traffic.pulse(name).in_flight:
                self._tries += 1
                with suppress(NotLent):
                    async with traffic.lend(name) as is_wanted:
                        await finish(self._measure(llama, self._drafting), is_wanted)
            if self._heard != (heard := traffic.pulse(name).bytes_seen):
                self._heard = heard
                await self._look(llama, self._drafting)
            await asyncio.sleep(every_s)

    async def _measure(self, llama: Llama, drafting: Drafting) -> None:
        with suppress(EngineSilent):  # whoever watches the engine finds out
            self._costs = await measure(llama, drafting, self._spend)

    async def _look(self, llama: Llama, drafting: Drafting) -> None:
        try:
            found = await llama.metrics()
        except EngineSilent:
            return
        if not isinstance(found, Refused):
            self._weigh(drafting, _tokens(found))

    def _spend(self, tokens: Tokens) -> None:
        self._ours += tokens

    def _weigh(self, drafting: Drafting, counted: Tokens) -> None:
        """Take in what the engine has counted; those answers are left aside that were for us."""
        self._tokens = counted - self._ours
        if not self._costs:
            return
        verdict = judge(drafting, self._costs, self._tokens - self._judged)
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
