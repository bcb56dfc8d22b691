"""Keeps the conversations of one replica: saves its idle slots, fills those of its next run.

An engine writes and reads in a spool of its own and never sees the shelf. What it wrote is verified
before it is kept, and verified again before it is handed back. Nothing here fails an instance: what
cannot be saved or restored is told, and the request is served cold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from supervisor.errors import StateDenied
from supervisor.events import Emit
from supervisor.fleet.slots.check import Unfit
from supervisor.fleet.slots.job import Job, Owner, Tally
from supervisor.fleet.slots.keeping import Keeping
from supervisor.fleet.slots.manifest import Identity, identify
from supervisor.fleet.slots.restoring import restore
from supervisor.fleet.slots.saving import save
from supervisor.life.llama import EngineSilent, Llama
from supervisor.profile.plan import Plan


@dataclass(frozen=True, slots=True)
class Charge:
    """What a keeper has to know of its replica, as it is when asked.

    Attributes:
        owner: Whose conversations they are.
        plan: What the present run was made from; None before the first.
        keeping: How they are kept.
        elders: Has an instance that serves in the same place save what it holds, so that its
            successor finds it.
    """

    owner: Callable[[], Owner]
    plan: Callable[[], Plan | None]
    keeping: Callable[[], Keeping]
    elders: Callable[[], Awaitable[None]]


class SlotKeeper:
    """Keeps the conversations of one replica.

    Args:
        charge: The replica.
        emit: Where events go.
        disproved: Identities to which nothing is restored any more, shared by all of a fleet.

    Attributes:
        chains: What the proxy called the conversations that the present run was begun with.
    """

    def __init__(self, charge: Charge, emit: Emit, disproved: set[Identity]) -> None:
        self._charge = charge
        self._emit = emit
        self._disproved = disproved
        self._turn = asyncio.Lock()
        self._known: dict[int, int | None] = {}
        self._known_run = 0
        self.chains: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """Return why nothing is kept, as a clause; None where it is, or no run was planned yet."""
        plan = self._charge.plan()
        if plan is None:
            return None
        if identify(plan) in self._disproved:
            return "what was restored was not used; other settings have it tried again"
        return self._charge.keeping().reason_against(plan)

    def prove(self, expected: int, cached: int) -> None:
        """Take in what the first answer after a restore says.

        Args:
            expected: Tokens of its prompt that were restored.
            cached: Tokens of it that the engine had.
        """
        plan = self._charge.plan()
        if plan is None or 2 * cached >= expected:
            return
        self._disproved.add(identify(plan))
        owner = self._charge.owner()
        self._emit(
            "slots.disproved",
            instance=owner.instance,
            model=owner.model,
            expected=expected,
            cached=cached,
        )

    async def save(self, llama: Llama, run: int) -> None:
        """Save what idle slots hold and is not saved yet, within the budgets."""
        job = self._job(run)
        if job is None:
            return
        if run != self._known_run:
            self._known, self._known_run = {}, run
        tally = Tally()
        try:
            async with asyncio.timeout(self._charge.keeping().timeout_s), self._turn:
                await save(job, llama, self._known, tally)
        except TimeoutError:
            job.unsaved("it took longer than save_timeout_s; the rest is not saved")
        except EngineSilent as error:
            job.unsaved(f"the engine does not answer: {error}")
        except (OSError, StateDenied, Unfit) as error:
            job.unsaved(str(error))
        job.saved(tally)

    async def restore(self, llama: Llama, run: int) -> int:
        """Fill slots with what was saved, the most recently used first; return how many."""
        self.chains = ()
        job = self._job(run)
        if job is None:
            return 0
        await self._charge.elders()
        tally = Tally()
        # An engine that falls silent is found out by those who watch it.
        with suppress(EngineSilent, OSError, StateDenied):
            self._known = await restore(job, llama, tally)
            self._known_run = run
        job.restored(tally)
        self.chains = tally.chains
        return tally.slots

    def _job(self, run: int) -> Job | None:
        keeping, plan = self._charge.keeping(), self._charge.plan()
        if plan is None or self.reason:
            return None
        return Job(
            run,
            self._charge.owner(),
            plan,
            identify(plan),
            keeping.shelf,
            keeping.budget,
            self._emit,
        )
