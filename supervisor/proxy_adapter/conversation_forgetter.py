"""Forgets conversations: in the router, in the slots of engines, and on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from proxy.requests.conversations import ForgottenConversation
from proxy.requests.history import StoredRequest
from proxy.router.router import Router
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.errors import NoSuchConversation
from supervisor.fleet.fleet import Fleet
from supervisor.instance.states import State
from supervisor.proxy_adapter.slot_file_storage import SlotFileStorageAdapter
from supervisor.slot_store.conversation_files import file_named, of_conversation
from supervisor.slot_store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was deleted.

    Attributes:
        slots: That engines emptied.
        is_in_use: Whether a request in flight is still of the conversation.
    """

    files: list[Manifest]
    slots: int = 0
    is_in_use: bool = False


class ConversationForgetter:
    def __init__(self, fleet: Fleet, router: Router, storage: SlotFileStorageAdapter) -> None:
        self._fleet = fleet
        self._files = fleet.slot_files
        self._router = router
        self._storage = storage
        self._began_at = datetime.now(UTC)

    def number_of(self, request: StoredRequest) -> int | None:
        """Return the number of the conversation of a request that this daemon answered."""
        number = request["conversation"]
        is_ours = datetime.fromisoformat(str(request["ended_at"])) >= self._began_at
        return number if is_ours and isinstance(number, int) else None

    async def forget_of(self, request: StoredRequest) -> ForgottenConversation | None:
        """As of `proxy.requests.conversations.Conversations`."""
        number = self.number_of(request)
        turns = () if number is None else self._router.turns_of_conversation(number)
        if not turns:
            return None
        found = await self._forget((), turns)
        return ForgottenConversation(len(found.files), found.slots, found.is_in_use)

    async def forget_files(self, model: str | None) -> Forgotten:
        """Delete the files of a model, or of all."""
        return Forgotten(await self._files.forget_model(model))

    async def forget_file(self, name: str) -> Forgotten:
        """Forget the conversation of a file, given the beginning of its name.

        Raises:
            NoSuchConversation: No file has it, or several do.
        """
        turns = await self._files.turns()
        name = file_named(turns, name)
        return await self._forget({name}, turns[name])

    async def forget_request(self, request_id: str, number: int | None) -> Forgotten:
        """Forget the conversation of a recent request, whose number may be known.

        Raises:
            NoSuchConversation: It is not known any more which that was.
        """
        turns = self._router.turns_of_request(request_id)
        if not turns and number is not None:
            turns = self._router.turns_of_conversation(number)
        if not turns:
            raise NoSuchConversation(
                f"the conversation of {request_id} is not known",
                hint="corral slots list has the names of those that are saved",
            )
        return await self._forget((), turns)

    async def _forget(self, names: Collection[str], turns: Collection[int]) -> Forgotten:
        _, known = of_conversation(await self._files.turns(), turns)
        forgotten = self._router.forget_conversations(known)
        await self._storage.settle()  # what is written now is stored and deleted
        erased = await self._erase(forgotten.slots)
        files = await self._files.forget(names, forgotten.turn_hashes)
        return Forgotten(files, erased, self._router.are_in_use(forgotten.numbers))

    async def _erase(self, held: Iterable[tuple[str, int]]) -> int:
        """Empty slots; return how many. One that a request has got meanwhile is emptied after."""
        snapshots = {one.name: one.instance.snapshot() for one in self._fleet.all_replicas()}
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
                    await slots.erase(client, id_slot)
                    erased += 1
        return erased
