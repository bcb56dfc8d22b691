"""Conversations by the hashes of their last turns. Bounded: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

# The ends of its last turns, and its own name if it has one.
_TURNS_MAX: Final = 6
# Only the latest conversations of a model count for balance: older ones fill no slot, and a new
# instance must not get all new ones until it owns as many.
_LATEST_MAX: Final = 128


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and its owner.

    Attributes:
        owner: The instance whose cache holds it.
        run: The number of the process of the owner.
        turn_hashes: Which identify its next turn, the oldest first, at hashes_max 6.
        number: Of this process; says nothing of the text.
    """

    model: str
    owner: str
    run: int
    turn_hashes: deque[int] = field(default_factory=deque)
    number: int = field(default_factory=count(1).__next__)


class Conversations:
    """Conversations of all models, with at hashes_max `hashes_max` hashes.

    `is_alive` returns whether the process that has a conversation still runs.
    """

    def __init__(self, hashes_max: int, is_alive: Callable[[Conversation], bool]) -> None:
        self._hashes_max = hashes_max
        self._is_alive = is_alive
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()
        self._latest: dict[str, OrderedDict[Conversation, None]] = {}

    def __len__(self) -> int:
        return len(self._conversations)

    def get(self, turn_hash: int) -> Conversation | None:
        """Return the conversation of a hash, whether or not its process still runs."""
        return self._conversations.get(turn_hash)

    def find(self, hashes: Iterable[int]) -> Conversation | None:
        """Return the first of these hashes' conversations whose process still runs."""
        found = map(self._conversations.get, hashes)
        return next(
            (
                conversation
                for conversation in found
                if conversation and self._is_alive(conversation)
            ),
            None,
        )

    def latest(self, model: str) -> Iterator[Conversation]:
        """Return the latest conversations of a model, the oldest first."""
        return filter(self._is_alive, self._latest.get(model, ()))

    def touch(self, conversation: Conversation) -> None:
        """Count a conversation as the latest of its model."""
        latest = self._latest.setdefault(conversation.model, OrderedDict())
        latest[conversation] = None
        latest.move_to_end(conversation)
        if len(latest) > _LATEST_MAX:
            latest.popitem(last=False)

    def add_turn(self, conversation: Conversation, turn_hash: int) -> None:
        """Identify a conversation by one more hash, and no longer by its oldest."""
        if self._conversations.get(turn_hash) is not conversation:
            conversation.turn_hashes.append(turn_hash)
            self._conversations[turn_hash] = conversation
        self._conversations.move_to_end(turn_hash)
        if len(conversation.turn_hashes) > _TURNS_MAX:
            self._remove_turn(conversation, conversation.turn_hashes.popleft())
        while len(self._conversations) > self._hashes_max:
            self._conversations.popitem(last=False)

    def _remove_turn(self, conversation: Conversation, turn_hash: int) -> None:
        if self._conversations.get(turn_hash) is conversation:
            del self._conversations[turn_hash]
