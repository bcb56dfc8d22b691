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
from supervisor.fleet.slots.header import NoSlotFile
from supervisor.fleet.slots.job import Chains, Job, Owner, Tally
from supervisor.fleet.slots.keeping import Keeping
from supervisor.fleet.slots.manifest import Manifest, identify
from supervisor.fleet.slots.proof import Had, held, is_disproved, is_doubtful
from supervisor.fleet.slots.restoring import Filled, restore
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
        chains: What the proxy calls those in its idle slots.
        elders: Has an instance that serves in the same place save what it holds, so that its
            successor finds it.
    """

    owner: Callable[[], Owner]
    plan: Callable[[], Plan | None]
    keeping: Callable[[], Keeping]
    chains: Chains
    elders: Callable[[], Awaitable[None]]


class SlotKeeper:
    """Keeps the conversations of one replica.

    Args:
        charge: The replica.
        emit: Where events go.
    """

    def __init__(self, charge: Charge, emit: Emit) -> None:
        self._charge = charge
        self._emit = emit
        self._turn = asyncio.Lock()
        self._run = 0
        self._known: dict[int, int | None] = {}
        self._begun: tuple[Filled, ...] = ()

    @property
    def reason(self) -> str | None:
        """Return why nothing is kept, as a clause; None where it is, or no run was planned yet."""
        plan = self._charge.plan()
        return self._charge.keeping().reason(plan) if plan else None

    def begun(self, run: int) -> tuple[Filled, ...]:
        """Return the slots as a run began with them; none where nothing was put into them."""
        return self._begun if run == self._run else ()

    def doubts(self, id_slot: int, had: Had) -> bool:
        """Return whether the first answer in a slot leaves a doubt that it was worth filling.

        Args:
            id_slot: Which.
            had: What that answer says.
        """
        one = self._in(id_slot)
        return one is not None and is_doubtful(one.tokens, had)

    async def prove(self, llama: Llama, run: int, id_slot: int, had: Had) -> None:
        """Look whether an engine computed anew what a slot was filled with; then nothing is kept.

        Args:
            llama: The engine.
            run: Its run.
            id_slot: Which.
            had: What the first answer there says.
        """
        job, one = self._job(run), self._in(id_slot)
        if job is None or one is None or run != self._run:
            return
        # What cannot be looked at, or is gone, proves nothing.
        with suppress(TimeoutError, EngineSilent, NoSlotFile, OSError, StateDenied):
            async with asyncio.timeout(self._charge.keeping().timeout_s), self._turn:
                before = await asyncio.to_thread(job.shelf.head, one)
                now = await held(job, llama, id_slot)
                shared = before.shared_with(now) if now else 0
                if is_disproved(shared, had, job.budget.tokens_min):
                    job.disproved(min(shared, had.prompt_tokens), had.cached_tokens)

    async def save(self, llama: Llama, run: int) -> None:
        """Save what idle slots hold and is not saved yet, within the budgets."""
        job = self._job(run)
        if job is None:
            return
        if run != self._run:
            self._known, self._begun, self._run = {}, (), run
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
        job = self._job(run)
        if job is None:
            return 0
        await self._charge.elders()
        tally = Tally()
        # An engine that falls silent is found out by those who watch it.
        with suppress(EngineSilent, OSError, StateDenied):
            found = await restore(job, llama, tally)
            self._known = {one.id_slot: one.id_task for one in found}
            self._begun, self._run = tuple(found) if tally.slots else (), run
        job.restored(tally)
        return tally.slots

    def _in(self, id_slot: int) -> Manifest | None:
        return next((one.kept for one in self._begun if one.id_slot == id_slot), None)

    def _job(self, run: int) -> Job | None:
        keeping, plan = self._charge.keeping(), self._charge.plan()
        if plan is None or self.reason:
            return None
        return Job(
            run,
            self._charge.owner(),
            plan,
            self._charge.chains,
            identify(plan),
            keeping.shelf,
            keeping.budget,
            self._emit,
        )
