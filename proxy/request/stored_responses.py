"""Stored responses by id, in memory, and requests that continue them.

Bounded: the oldest go first. A turn keeps only its own items and a reference to the turn before it,
so a conversation takes as much memory as its text. A turn stays as long as a stored response needs
it. `StoredTurn` is one request: completed from the store, then stored with its response.

Source: OpenAI's API reference, "Create a model response": `previous_response_id`, `store`, items of
type `item_reference`; instructions are not carried over.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.errors import BadRequest, LimitExceeded, PreviousResponseNotFound, quote
from proxy.settings import StoredResponseSettings

# Memory of the objects around a response of any length.
_OVERHEAD_BYTES: Final = 1024

Items = Sequence[Any]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response and the input of its request; kept while a later turn needs it."""

    id: str
    input: bytes  # JSON of the request's items, without those of earlier turns.
    response: bytes
    previous: StoredResponse | None
    stored_at_s: float
    holders: int = 0  # Whether it is stored, and the number of later turns that need it.

    @property
    def size_bytes(self) -> int:
        return len(self.input) + len(self.response) + _OVERHEAD_BYTES

    @property
    def items(self) -> Items:
        output: list[Any] = orjson.loads(self.response)["output"]
        given: list[Any] = orjson.loads(self.input)
        return given + output

    def turns(self) -> Sequence[StoredResponse]:
        """Return the turns of its conversation, oldest first."""
        found: list[StoredResponse] = []
        turn: StoredResponse | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.previous
        return found[::-1]

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items that it answers, with all earlier turns, oldest first.

        Items that a client sent without an id get a stable id.
        """
        found: list[Any] = []
        for turn in self.turns():
            given = [item for item in orjson.loads(turn.input) if isinstance(item, dict)]
            found += [
                _item_for_client(item, f"item_{turn.id}_{number}")
                for number, item in enumerate(given)
            ]
            if turn is not self:
                found += orjson.loads(turn.response)["output"]
        return found


_Key = tuple[str, str]


class ResponseStore:
    """The stored responses of all owners: names of API keys, or "" if no key is needed.

    Reads change nothing, so other threads may read.
    """

    def __init__(
        self, settings: StoredResponseSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.held_bytes = 0
        self._clock = clock
        self._responses: OrderedDict[_Key, StoredResponse] = OrderedDict()
        self._by_item: dict[_Key, StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._find_unexpired(self._responses.get((owner, response_id)))

    def item(self, owner: str, item_id: str) -> Mapping[str, Any] | None:
        stored = self._find_unexpired(self._by_item.get((owner, item_id)))
        items = stored.items if stored else ()
        return next((item for item in items if _id_of(item) == item_id), None)

    def add(
        self, owner: str, given: Items, response: Mapping[str, Any], previous: StoredResponse | None
    ) -> None:
        """Store a response to the given items."""
        stored = StoredResponse(
            response["id"], orjson.dumps(given), orjson.dumps(response), previous, self._clock()
        )
        self.delete(owner, stored.id)
        self._responses[owner, stored.id] = stored
        self._by_item.update(
            dict.fromkeys(_item_keys(owner, [*given, *response["output"]]), stored)
        )
        self.held_bytes += stored.size_bytes
        for needed in filter(None, (stored, previous)):
            needed.holders += 1
        self.trim()

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; return whether it existed. Later turns keep their own history."""
        stored = self._responses.pop((owner, response_id), None)
        if stored is None:
            return False
        for key in _item_keys(owner, stored.items):
            if self._by_item.get(key) is stored:
                del self._by_item[key]
        needed: StoredResponse | None = stored
        while needed is not None:
            needed.holders -= 1
            if needed.holders:
                break
            self.held_bytes -= needed.size_bytes
            needed = needed.previous
        return self._find_unexpired(stored) is not None

    def trim(self) -> None:
        """Delete responses that are too old or exceed the limits."""
        settings = self.settings
        while self._responses:
            (owner, response_id), oldest = next(iter(self._responses.items()))
            is_full = len(self) > settings.max_count or self.held_bytes > settings.max_bytes
            if not is_full and self._find_unexpired(oldest):
                return
            self.delete(owner, response_id)

    def _find_unexpired(self, stored: StoredResponse | None) -> StoredResponse | None:
        if stored is None or self._clock() - stored.stored_at_s > self.settings.keep_s:
            return None
        return stored


def _item_keys(owner: str, items: Items) -> list[_Key]:
    return [(owner, item_id) for item_id in map(_id_of, items) if item_id]


def _item_for_client(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    status = item.get("status") or "completed"
    shown = {**item, "id": _id_of(item) or item_id, "status": status}
    if "role" not in item:
        return shown
    shown["type"] = "message"
    if isinstance(text := item.get("content"), str):
        is_output = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        shown["content"] = [{**part, "text": text}]
    return shown


def _id_of(item: object) -> str | None:
    found = item.get("id") if isinstance(item, dict) else None
    return found if isinstance(found, str) else None


_MARKS: Final = (b'"previous_response_id"', b'"item_reference"')


class StoredTurn:
    """One request of the Responses API, completed from the store and stored with its response.

    Nothing is stored if the settings, or the request's `store`, turn it off. `owner` is the name of
    the client's API key, or empty; `max_bytes` bounds the conversation that a request may continue.
    """

    def __init__(self, store: ResponseStore, owner: str, max_bytes: int) -> None:
        self.previous_response_id: str | None = None
        self.is_stored = False
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._given: Items = ()
        self._previous: StoredResponse | None = None

    def size_bytes(self, body: bytes) -> int:
        """Return how long a request may become with the items that it refers to."""
        return self._max_bytes if any(mark in body for mark in _MARKS) else len(body)

    def members(self, members: dict[str, Any]) -> dict[str, Any]:
        """Return the request with the whole conversation; the same object if it is complete.

        Raises:
            BadRequest: Stored responses are off, an item is unknown, or the request has
                `conversation` or `background`.
            PreviousResponseNotFound: No response of the owner has the id.
            LimitExceeded: The conversation is too long.
        """
        if members.get("conversation") is not None:
            raise BadRequest("conversation is not supported; name a previous_response_id instead")
        if members.get("background"):
            raise BadRequest("background is not supported; leave it out, or use /v1/batches")
        given = members.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            return members  # the engine refuses it
        self._given = known = [self._resolve_item(item) for item in items]
        self.is_stored = self._store.settings.enabled and members.get("store") is not False
        history = self._history(members.get("previous_response_id"))
        if self.previous_response_id is None and known == items:
            return members
        kept = {name: value for name, value in members.items() if name != "previous_response_id"}
        return {**kept, "input": [*history, *known]}

    def add(self, response: Mapping[str, Any]) -> None:
        if self.is_stored:
            self._store.add(self._owner, self._given, response, self._previous)

    def _history(self, response_id: object) -> Items:
        if response_id is None or response_id == "":
            return ()
        if not isinstance(response_id, str):
            raise BadRequest("previous_response_id must be a string")
        self._need_store("previous_response_id")
        stored = self._store.find(self._owner, response_id)
        if stored is None:
            raise PreviousResponseNotFound(response_id)
        self.previous_response_id, self._previous = response_id, stored
        turns = stored.turns()
        if (size_bytes := sum(turn.size_bytes for turn in turns)) > self._max_bytes:
            raise LimitExceeded(
                f"previous_response_id: the stored conversation has {size_bytes} bytes, more than "
                f"{self._max_bytes}; begin a new one, or raise max_body_bytes under [proxy]"
            )
        return [item for turn in turns for item in turn.items]

    def _resolve_item(self, item: Any) -> Any:
        match item:
            case {"type": "item_reference", "id": str(item_id)}:
                self._need_store("an item of type item_reference")
                found = self._store.item(self._owner, item_id)
                if found is None:
                    raise BadRequest(f"Item with id {quote(item_id)} not found.")
                return found
        return item

    def _need_store(self, what: str) -> None:
        if not self._store.settings.enabled:
            raise BadRequest(
                f"{what} needs stored responses, which are off; set enabled = true under "
                "[proxy.stored_responses], or send the whole conversation in input (store: false)"
            )
