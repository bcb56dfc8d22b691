"""Keeps the conversations of one replica: saves its idle slots, fills those of its next run.

An engine writes and reads in a spool of its own and never sees the slot store. What it wrote is
verified before it is kept, and verified again before it is handed back. Nothing here fails an
instance: what cannot be saved or restored is told, and the request is served cold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.slot_store.config import SlotPersistence
from supervisor.slot_store.file_check import InvalidSlotFile
from supervisor.slot_store.manifest import Manifest, cache_key
from supervisor.slot_store.restore import RestoredSlot, restore
from supervisor.slot_store.save import save
from supervisor.slot_store.slot_file import NotASlotFile
from supervisor.slot_store.task import Fingerprints, ReplicaRef, SlotTask, SlotTransfer
from supervisor.slot_store.verify import CacheObservation, is_doubtful, is_unused, read_back


@dataclass(frozen=True, slots=True)
class SlotManagerContext:
    """What a keeper has to know of its replica, as it is when asked.

    Attributes:
        owner: Whose conversations they are.
        plan: What the present run was made from; None before the first.
        keeping: How they are kept.
        fingerprints: What the proxy calls those in its idle slots.
        elders: Has an instance that serves in the same place save what it holds, so that its
            successor finds it.
    """

    owner: Callable[[], ReplicaRef]
    plan: Callable[[], Plan | None]
    keeping: Callable[[], SlotPersistence]
    fingerprints: Fingerprints
    elders: Callable[[], Awaitable[None]]


class SlotManager:
    """Keeps the conversations of one replica.

    Args:
        charge: The replica.
        emit: Where events go.
    """

    def __init__(self, charge: SlotManagerContext, emit: Emit) -> None:
        self._charge = charge
        self._emit = emit
        self._turn = asyncio.Lock()
        self._run = 0
        self._known: dict[int, int | None] = {}
        self._begun: tuple[RestoredSlot, ...] = ()

    @property
    def reason(self) -> str | None:
        """Return why nothing is kept, as a clause; None where it is, or no run was planned yet."""
        plan = self._charge.plan()
        return self._charge.keeping().reason(plan) if plan else None

    def restored_slots(self, run: int) -> tuple[RestoredSlot, ...]:
        """Return the slots as a run began with them; none where nothing was put into them."""
        return self._begun if run == self._run else ()

    def is_doubtful(self, id_slot: int, had: CacheObservation) -> bool:
        """Return whether the first answer in a slot leaves a doubt that it was worth filling.

        Args:
            id_slot: Which.
            had: What that answer says.
        """
        one = self._in(id_slot)
        return one is not None and is_doubtful(one.tokens, had)

    async def verify(
        self, client: EngineClient, run: int, id_slot: int, had: CacheObservation
    ) -> None:
        """Look whether an engine computed anew what a slot was filled with; then nothing is kept.

        Args:
            client: The engine.
            run: Its run.
            id_slot: Which.
            had: What the first answer there says.
        """
        job, one = self._job(run), self._in(id_slot)
        if job is None or one is None or run != self._run:
            return
        # What cannot be looked at, or is gone, proves nothing.
        with suppress(TimeoutError, EngineUnreachable, NotASlotFile, OSError, AccessDenied):
            async with asyncio.timeout(self._charge.keeping().timeout_s), self._turn:
                before = await asyncio.to_thread(job.store.head, one)
                now = await read_back(job, client, id_slot)
                shared = before.shared_with(now) if now else 0
                if is_unused(shared, had, job.budget.tokens_min):
                    job.restore_unused(min(shared, had.prompt_tokens), had.cached_tokens)

    async def save(self, client: EngineClient, run: int) -> None:
        """Save what idle slots hold and is not saved yet, within the budgets."""
        job = self._job(run)
        if job is None:
            return
        if run != self._run:
            self._known, self._begun, self._run = {}, (), run
        tally = SlotTransfer()
        try:
            async with asyncio.timeout(self._charge.keeping().timeout_s), self._turn:
                await save(job, client, self._known, tally)
        except TimeoutError:
            job.save_failed("it took longer than slot_save_timeout_s; the rest is not saved")
        except EngineUnreachable as error:
            job.save_failed(f"the engine does not answer: {error}")
        except (OSError, AccessDenied, InvalidSlotFile) as error:
            job.save_failed(str(error))
        job.saved(tally)

    async def restore(self, client: EngineClient, run: int) -> int:
        """Fill slots with what was saved, the most recently used first; return how many."""
        job = self._job(run)
        if job is None:
            return 0
        await self._charge.elders()
        tally = SlotTransfer()
        # An engine that falls silent is found out by those who watch it.
        with suppress(EngineUnreachable, OSError, AccessDenied):
            found = await restore(job, client, tally)
            self._known = {one.id_slot: one.task for one in found}
            self._begun, self._run = tuple(found) if tally.slots else (), run
        job.restored(tally)
        return tally.slots

    def _in(self, id_slot: int) -> Manifest | None:
        return next((one.kept for one in self._begun if one.id_slot == id_slot), None)

    def _job(self, run: int) -> SlotTask | None:
        keeping, plan = self._charge.keeping(), self._charge.plan()
        if plan is None or self.reason:
            return None
        return SlotTask(
            run,
            self._charge.owner(),
            plan,
            self._charge.fingerprints,
            cache_key(plan),
            keeping.store,
            keeping.budget,
            self._emit,
        )
