"""Has engines prefill prompts, and write, read and delete slot files, for the proxy.

Each prefix that conversations share gets a slot file, once, in an idle moment: a slot of an engine
that was given the prefix before computes it, mostly from a cache, and is saved. The file belongs to
no conversation: any that begins with the prefix continues from it, on any engine with the same
cache key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from proxy.cache.fingerprint import ConversationFingerprint, scales_of
from proxy.cache.shared_prefixes import LORA, SharedPrefix, shared_prefix
from proxy.errors import BadRequest, ModelLoading, NotLoaded, ProxyError, Unavailable
from proxy.observe.past import ForgottenConversation, StoredRequest
from proxy.request.models import PrefillResult
from proxy.router.router import Router
from proxy.upstream.upstream import Upstream
from supervisor.backend.models import failure, without_directories
from supervisor.engine import client as client_module
from supervisor.engine import prompts
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.engine.prompts import WarmPrompt, save_and_emit
from supervisor.engine.states import State
from supervisor.engine.warmup import FilledSlot, Preempted, prefill_slot, run_until_preempted
from supervisor.errors import CorralError, DaemonBusy, NoSuchConversation, SettingsInvalid
from supervisor.events import Emit, Event, Part
from supervisor.fleet import cache_commands
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, availability
from supervisor.slot_store.file_index import find_prefix
from supervisor.slot_store.manifest import Manifest, find_conversation, find_file

# If no engine is idle for so long, the file is given up until three more conversations share the
# prefix.
_PATIENCE_S: Final = 600.0
_TICK_S: Final = 0.5

_Key = tuple[str, tuple[int, ...]]


# A prompt to compute, and the monotonic time until which its file is wanted.
_Wanted = tuple[WarmPrompt, float]


class PromptWarmerAdapter(Part):
    """Prefills prompts, and makes the files of prefixes, one after the other; at most 16 wait."""

    def __init__(self, fleet: Fleet, router: Router, emit: Emit) -> None:
        self._fleet = fleet
        self._router = router
        self._storage = fleet.slot_storage
        self._emit = emit
        self._wanted: dict[_Key, _Wanted] = {}
        self._task: asyncio.Task[None] | None = None

    def _want(self, model: str, prefix: SharedPrefix) -> None:
        """Have a file made of a prefix, unless there is one."""
        key = model, prefix.blocks
        if key in self._wanted or len(self._wanted) >= 16:
            return
        prompt = prompts.of_request("of conversations", prefix.body)
        self._wanted[key] = prompt, time.monotonic() + _PATIENCE_S
        if self._task is None or self._task.done():
            with suppress(DaemonBusy):
                self._task = self._fleet.spawn(self._work())

    def observe(self, event: Event) -> None:
        """Want files for the prompts that were prefilled on an instance that is ready now."""
        if event.name != "instance.state_changed" or event.fields["after"] != State.READY:
            return
        replica = self._fleet.replica(str(event.fields["instance"]))
        for prompt in replica.prompts:
            if prefix := shared_prefix(replica.place.model, prompt.body):
                self._want(replica.place.model, prefix)

    async def _work(self) -> None:
        while self._wanted:
            await asyncio.sleep(_TICK_S)  # first let clients that continue at once do so
            for key, wanted in tuple(self._wanted.items()):
                del self._wanted[key]  # first: a failure is not tried again
                if not await self._is_done(key, wanted):
                    self._wanted[key] = wanted

    async def _is_done(self, key: _Key, wanted: _Wanted) -> bool:
        """Make a file if an engine is idle; return whether nothing is left to do."""
        (model, blocks), (prompt, until_s) = key, wanted
        its = ConversationFingerprint((), blocks, scales_of(prompt.body.get(LORA)))
        found = self._router.prefix_storing_instances(model, blocks)
        if time.monotonic() > until_s or self._has_file(found, blocks):
            return True
        for upstream in found:
            if self._router.activity(upstream.name).in_flight == 0:
                with suppress(Preempted, ProxyError):
                    await self._make(upstream, its, prompt)
                    return True
        return not found

    def _has_file(self, upstreams: Sequence[Upstream], blocks: tuple[int, ...]) -> bool:
        """Return whether there is a file; note its use."""
        catalogue = self._fleet.slot_files.catalogue
        tokens_min = self._fleet.planner.launches.slot_persistence.limits.tokens_min
        for key in {upstream.cache_key for upstream in upstreams}:
            if found := find_prefix(catalogue, key, blocks, tokens_min):
                catalogue.note_use(found.file.name, datetime.now(tz=UTC))
                return True
        return False

    async def _make(
        self, upstream: Upstream, its: ConversationFingerprint, prompt: WarmPrompt
    ) -> None:
        """Compute a prefix and save its slot; a failure is not tried again.

        Raises Preempted if a client needs the slot, ProxyError if no slot was free.
        """
        name = upstream.name
        snapshot = self._fleet.replica(name).instance.snapshot()
        filled: list[FilledSlot | None] = []

        async def compute() -> None:
            async with EngineClient(snapshot.endpoint, snapshot.api_key) as client:
                with suppress(EngineUnreachable):
                    filled.append(await prefill_slot(client, prompt))

        async with self._router.background_lease(name, "(files)") as is_preempted:
            await run_until_preempted(compute(), is_preempted)
            for slot in filter(None, filled):
                await self._save(upstream, slot, its)

    async def _save(
        self, upstream: Upstream, slot: FilledSlot, its: ConversationFingerprint
    ) -> None:
        id_slot, tokens, cached = slot
        if not self._storage.may_save(upstream.name, tokens * upstream.token_bytes):
            return
        saved = await self._storage.save(upstream.name, id_slot, tokens, its)
        if saved:
            self._emit(
                "prefix.saved",
                instance=upstream.name,
                model=upstream.model,
                tokens=saved.tokens,
                cached=cached,
                size_bytes=saved.size_bytes,
            )

    def learns(self, model: str) -> bool:
        launches = self._fleet.planner.launches
        return launches.learns_prompts(model) or bool(self._router.prefix_storing_instances(model))

    def learn(self, model: str, prefix: SharedPrefix) -> None:
        if self._router.prefix_storing_instances(model):
            self._want(model, prefix)
        if not self._fleet.planner.launches.learns_prompts(model):
            return
        learned = self._fleet.planner.launches.learned
        with suppress(DaemonBusy):  # the daemon is stopping
            self._fleet.spawn(save_and_emit(learned, model, prefix.body, prefix.tokens, self._emit))

    async def warm(self, model: str, body: Mapping[str, Any]) -> list[PrefillResult]:
        """Prefill a prompt on every instance that serves; clients take precedence.

        Raises:
            BadRequest: The body is not a chat request, or an instance rejected it.
            Unavailable: The model does not serve, or an instance was busy for too long.
        """
        if model_now := self._fleet.models.get(model):  # a reload may have removed it
            self._check_serving(model, model_now)
        replicas = model_now.replicas if model_now else ()
        try:
            prompt = prompts.of_request("in the body", body)
            found = await cache_commands.warm(replicas, prompt, self._router)
        except SettingsInvalid as error:
            raise BadRequest(f"{error.message}; {error.hint}") from error
        if isinstance(found, SettingsInvalid):
            raise BadRequest(without_directories(found.message))
        if isinstance(found, CorralError):
            message = without_directories(f"{found.message}; {found.hint}")
            raise Unavailable(message, retry_after_s=10)
        return found

    def _check_serving(self, name: str, model: Model) -> None:
        """Raise the error that other endpoints raise for a model that does not serve."""
        state, reason = availability(model)
        if state == "failed":
            raise failure(model, reason)
        if state == "loading":
            raise ModelLoading(f"{name} is still loading; retry later", retry_after_s=10)
        if state == "unloaded":
            raise NotLoaded(f"{name} is not loaded; run `corral load {name}` first")


# The deleted files, the number of emptied slots, and whether a request still uses it.
Forgotten = tuple[list[Manifest], int, bool]


class ConversationForgetter:
    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet = fleet
        self._files = fleet.slot_files
        self._router = router
        self._began_at = datetime.now(UTC)

    def number_of(self, request: StoredRequest) -> int | None:
        """Return the number of a request's conversation, if this daemon answered the request."""
        number = request["conversation"]
        is_ours = datetime.fromisoformat(str(request["ended_at"])) >= self._began_at
        return number if is_ours and isinstance(number, int) else None

    async def forget_of(self, request: StoredRequest) -> ForgottenConversation | None:
        """Implements `proxy.observe.past.Conversations`."""
        turns = self._router.cache.turns(None, self.number_of(request))
        if not turns:
            return None
        files, slots, is_in_use = await self._forget((), turns)
        return ForgottenConversation(len(files), slots, is_in_use)

    async def forget_files(self, model: str | None) -> Forgotten:
        """Delete the files of a model, or of all."""
        return await self._files.forget_model(model), 0, False

    async def forget_file(self, name: str) -> Forgotten:
        """Forget the conversation of the one file whose name begins so; or NoSuchConversation."""
        turns = await self._files.turns()
        name = find_file(turns, name)
        return await self._forget({name}, turns[name])

    async def forget_request(self, request_id: str, number: int | None) -> Forgotten:
        """Forget a recent request's conversation, whose number may be known.

        Raises NoSuchConversation if it is no longer known.
        """
        turns = self._router.cache.turns(request_id, number)
        if not turns:
            raise NoSuchConversation(
                f"the conversation of {request_id} is not known",
                hint="corral slots list has the names of saved conversations",
            )
        return await self._forget((), turns)

    async def _forget(self, names: Collection[str], turns: Collection[int]) -> Forgotten:
        _, known = find_conversation(await self._files.turns(), turns)
        hashes, held, numbers = self._router.cache.forget_conversations(known)
        await self._fleet.slot_storage.settle()  # running saves are stored first, then deleted
        # A slot in use is emptied after its request.
        replicas = self._fleet.all_replicas()
        snapshots = {replica.name: replica.instance.snapshot() for replica in replicas}
        erased = 0
        for name, id_slot in held:
            snapshot = snapshots.get(name)
            if snapshot is None or snapshot.state is not State.READY:
                continue
            with suppress(EngineUnreachable, TimeoutError):
                async with (
                    asyncio.timeout(self._files.timeout_s),
                    EngineClient(snapshot.endpoint, snapshot.api_key) as client,
                ):
                    await client_module.erase(client, id_slot)
                    erased += 1

        return await self._files.forget(names, hashes), erased, self._router.are_in_use(numbers)
