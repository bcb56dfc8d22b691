"""Responses by their ids, in memory, with what they answer. Bounded: the oldest go first.

A turn of a conversation keeps only its own items and the turn before it, so a conversation takes as
much memory as its text. A turn stays as long as a stored response needs it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.responses_config import StoredResponseSettings

# The objects that hold a response, whatever its length.
_OVERHEAD_BYTES: Final = 1024

Items = Sequence[Any]


@dataclass(slots=True, eq=False)
class Turn:
    """What one response answered, and that response.

    Attributes:
        input: The items of its request, without those of the turns before; JSON.
        response: JSON.
        holders: Stored responses and later turns that need it.
    """

    input: bytes
    response: bytes
    previous: Turn | None
    holders: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.input) + len(self.response) + _OVERHEAD_BYTES

    @property
    def items(self) -> Items:
        """The items of its request and its response."""
        output: list[Any] = orjson.loads(self.response)["output"]
        given: list[Any] = orjson.loads(self.input)
        return given + output


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    id: str
    turn: Turn
    stored_at_s: float
    item_ids: frozenset[str]

    def turns(self) -> Sequence[Turn]:
        """Its conversation, the oldest turn first."""
        found, turn = [], self.turn
        while True:
            found.append(turn)
            if turn.previous is None:
                return found[::-1]
            turn = turn.previous

    def input_items(self) -> list[dict[str, Any]]:
        """What it answers, with the turns before it, the oldest first, as OpenAI shows items.

        Items that a client sent without an id get one that stays the same.
        """
        found: list[Any] = []
        for turn in self.turns():
            response = orjson.loads(turn.response)
            given = [item for item in orjson.loads(turn.input) if isinstance(item, dict)]
            found += [
                _shown(item, f"item_{response['id']}_{number}") for number, item in enumerate(given)
            ]
            if turn is not self.turn:
                found += response["output"]
        return found


_Key = tuple[str, str]


class ResponseStore:
    """Stored responses of all owners: the names of API keys, or the empty one where none is needed.

    Reading changes nothing, so another thread may read.
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
        return self._unexpired(self._responses.get((owner, response_id)))

    def item(self, owner: str, item_id: str) -> Mapping[str, Any] | None:
        """Return an item of a request or response of the owner."""
        stored = self._unexpired(self._by_item.get((owner, item_id)))
        items = stored.turn.items if stored else ()
        return next((one for one in items if _id_of(one) == item_id), None)

    def add(
        self, owner: str, given: Items, response: Mapping[str, Any], previous: Turn | None
    ) -> None:
        """Store a response to some items."""
        turn = Turn(orjson.dumps(given), orjson.dumps(response), previous)
        ids = frozenset(filter(None, map(_id_of, [*given, *response["output"]])))
        stored = StoredResponse(response["id"], turn, self._clock(), ids)
        self.delete(owner, stored.id)
        self._responses[owner, stored.id] = stored
        self._by_item.update(dict.fromkeys(((owner, one) for one in ids), stored))
        self._hold(turn)
        self.trim()

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response; return whether there was one. Later turns keep what they need."""
        stored = self._responses.pop((owner, response_id), None)
        if stored is None:
            return False
        for key in [(owner, one) for one in stored.item_ids]:
            if self._by_item.get(key) is stored:
                del self._by_item[key]
        self._release(stored.turn)
        return self._unexpired(stored) is not None

    def _hold(self, turn: Turn) -> None:
        turn.holders += 1
        self.held_bytes += turn.size_bytes
        if turn.previous is not None:
            turn.previous.holders += 1

    def _release(self, last: Turn) -> None:
        turn: Turn | None = last
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.held_bytes -= turn.size_bytes
            turn = turn.previous

    def trim(self) -> None:
        """Delete what is too old or too much."""
        while self._responses:
            (owner, response_id), oldest = next(iter(self._responses.items()))
            if not self._is_full and self._unexpired(oldest):
                return
            self.delete(owner, response_id)

    @property
    def _is_full(self) -> bool:
        settings = self.settings
        return len(self) > settings.max_count or self.held_bytes > settings.max_bytes

    def _unexpired(self, stored: StoredResponse | None) -> StoredResponse | None:
        if stored is None or self._clock() - stored.stored_at_s > self.settings.keep_s:
            return None
        return stored


def _shown(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
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
