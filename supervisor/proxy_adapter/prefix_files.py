"""Has a slot file made of each prefix that conversations share, once, in an idle moment.

The prefix is computed in a slot of an engine that was given it before, where most of it is found in
a cache, and that slot is saved. The file belongs to no conversation: those that begin with the
prefix go on from it, on any engine with the same cache key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from proxy.errors import ProxyError
from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.prompt_cache.shared_prefixes import SharedPrefix, shared_prefix
from proxy.router.router import Router
from proxy.slot_files.storage import SlotFileStorage
from proxy.upstream.upstream import Upstream
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.errors import DaemonBusy
from supervisor.events import Emit, Event
from supervisor.fleet.fleet import Fleet
from supervisor.instance.states import State
from supervisor.slot_store.prefixes import find_prefix
from supervisor.warmup import prompts
from supervisor.warmup.prefill import FilledSlot, prefill_slot
from supervisor.warmup.prompts import WarmPrompt
from supervisor.warmup.queue import Preempted, run_until_preempted

_WANTED_MAX: Final = 16
# An engine that was never idle so long is asked again when three more conversations share a prefix.
_PATIENCE_S: Final = 600.0
_TICK_S: Final = 0.5

_Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    prompt: WarmPrompt
    until_s: float


class PrefixFiles:
    """Makes the files that are wanted, one after the other; at most 16 wait."""

    def __init__(self, fleet: Fleet, router: Router, storage: SlotFileStorage, emit: Emit) -> None:
        self._fleet = fleet
        self._router = router
        self._storage = storage
        self._emit = emit
        self._wanted: dict[_Key, _Wanted] = {}
        self._task: asyncio.Task[None] | None = None

    def want(self, model: str, prefix: SharedPrefix) -> None:
        """Have a file made of a prefix, unless there is one."""
        key = model, prefix.blocks
        if key in self._wanted or len(self._wanted) >= _WANTED_MAX:
            return
        self._wanted[key] = _Wanted(
            prompts.of_request("of conversations", prefix.body), time.monotonic() + _PATIENCE_S
        )
        if self._task is None or self._task.done():
            with suppress(DaemonBusy):
                self._task = self._fleet.spawn(self._work())

    def observe(self, event: Event) -> None:
        """Want files of the prompts that were prefilled for an instance which is ready now."""
        if event.name != "instance.state_changed" or event.fields["after"] != State.READY:
            return
        replica = self._fleet.replica(str(event.fields["instance"]))
        for prompt in replica.prompts:
            if prefix := shared_prefix(replica.place.model, prompt.body):
                self.want(replica.place.model, prefix)

    async def _work(self) -> None:
        while self._wanted:
            await asyncio.sleep(_TICK_S)  # a client that goes on at once does so before
            for key, wanted in tuple(self._wanted.items()):
                del self._wanted[key]  # first: what fails is not tried again
                if not await self._is_done(key, wanted):
                    self._wanted[key] = wanted

    async def _is_done(self, key: _Key, wanted: _Wanted) -> bool:
        """Make a file where an engine is idle; return whether there is no more to do."""
        model, blocks = key
        found = self._router.that_store_prefixes(model, blocks)
        if time.monotonic() > wanted.until_s or self._has_file(found, blocks):
            return True
        for upstream in found:
            if self._router.activity(upstream.name).in_flight == 0:
                with suppress(Preempted, ProxyError):
                    await self._make(upstream, blocks, wanted.prompt)
                    return True
        return not found

    def _has_file(self, upstreams: Sequence[Upstream], blocks: tuple[int, ...]) -> bool:
        """Return whether there is a file, which is used then."""
        catalogue = self._fleet.slot_files.catalogue
        tokens_min = self._fleet.planner.launches.slot_persistence.budget.tokens_min
        for key in {one.cache_key for one in upstreams}:
            if found := find_prefix(catalogue, key, blocks, tokens_min):
                catalogue.note_use(found.file.name, datetime.now(tz=UTC))
                return True
        return False

    async def _make(self, upstream: Upstream, blocks: tuple[int, ...], prompt: WarmPrompt) -> None:
        """Compute a prefix and save its slot; a failure is not tried again.

        Raises:
            Preempted: A client needs the slot.
            ProxyError: No slot was free.
        """
        name = upstream.name
        snapshot = self._fleet.replica(name).instance.snapshot()
        filled: list[FilledSlot | None] = []

        async def compute() -> None:
            async with EngineClient(snapshot.endpoint, snapshot.api_key) as client:
                with suppress(EngineUnreachable):
                    filled.append(await prefill_slot(client, prompt))

        async with self._router.background_lease(name) as is_preempted:
            await run_until_preempted(compute(), is_preempted)
            for slot in filter(None, filled):
                await self._save(upstream, slot, blocks)

    async def _save(self, upstream: Upstream, slot: FilledSlot, blocks: tuple[int, ...]) -> None:
        if not self._storage.may_save(upstream.name, slot.tokens * upstream.token_bytes):
            return
        fingerprint = ConversationFingerprint((), blocks)
        saved = await self._storage.save(upstream.name, slot.id_slot, slot.tokens, fingerprint)
        if saved:
            self._emit(
                "prefix.saved",
                instance=upstream.name,
                model=upstream.model,
                tokens=saved.tokens,
                cached=slot.cached_tokens,
                size_bytes=saved.size_bytes,
            )
