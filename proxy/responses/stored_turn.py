"""One request of a stored conversation: completed from the store, then stored with its response.

Source: OpenAI's API reference, "Create a model response": `previous_response_id`, `store`, items of
type `item_reference`; instructions are not carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proxy.errors import BadRequest, LimitExceeded, PreviousResponseNotFound, quoted
from proxy.responses.store import Items, ResponseStore, Turn

_MARKS: Final = (b'"previous_response_id"', b'"item_reference"')


class StoredTurn:
    """Nothing is stored where the settings, or the request by `store`, do not want it.

    Args:
        store: Of all responses.
        owner: The name of the client's API key, or empty.
        max_bytes: The longest conversation that a request may continue.

    Attributes:
        previous_response_id: As the request names it, or None.
        is_stored: Whether the response will be stored.
    """

    def __init__(self, store: ResponseStore, owner: str, max_bytes: int) -> None:
        self.previous_response_id: str | None = None
        self.is_stored = False
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._given: Items = ()
        self._previous: Turn | None = None

    def size_bytes(self, body: bytes) -> int:
        """Return how long a request may become, by what it may refer to."""
        return self._max_bytes if any(mark in body for mark in _MARKS) else len(body)

    def members(self, members: dict[str, Any]) -> dict[str, Any]:
        """Return the request with the whole conversation; the same object where it has it.

        Raises:
            BadRequest: Stored responses are off, an item is unknown, a conversation is named, or
                the response is to be computed in the background.
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
        self._given = known = [self._known(item) for item in items]
        self.is_stored = self._store.settings.enabled and members.get("store") is not False
        history = self._history(members.get("previous_response_id"))
        if self.previous_response_id is None and known == items:
            return members
        kept = {name: one for name, one in members.items() if name != "previous_response_id"}
        return {**kept, "input": [*history, *known]}

    def add(self, response: Mapping[str, Any]) -> None:
        """Store the response."""
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
        self.previous_response_id, self._previous = response_id, stored.turn
        turns = stored.turns()
        if (size_bytes := sum(turn.size_bytes for turn in turns)) > self._max_bytes:
            raise LimitExceeded(
                f"previous_response_id: the stored conversation has {size_bytes} bytes, more than "
                f"{self._max_bytes}; begin a new one, or raise max_body_bytes under [proxy]"
            )
        return [item for turn in turns for item in turn.items]

    def _known(self, item: Any) -> Any:
        match item:
            case {"type": "item_reference", "id": str(item_id)}:
                self._need_store("an item of type item_reference")
                found = self._store.item(self._owner, item_id)
                if found is None:
                    raise BadRequest(f"Item with id {quoted(item_id)} not found.")
                return found
        return item

    def _need_store(self, what: str) -> None:
        if not self._store.settings.enabled:
            raise BadRequest(
                f"{what} needs stored responses, which are off; set enabled = true under "
                "[proxy.stored_responses], or send the whole conversation in input (store: false)"
            )
