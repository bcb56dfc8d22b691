"""Conversations by the marks of their last turns. Bounded: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

# A conversation is known by the ends of its last turns, and by its own name if it has one.
_MARKS_EACH: Final = 6
# Only the latest conversations of a model count as an instance's homes: those long over fill no
# slot, and an instance that starts anew must not be given everything until it has as many.
_LATEST_MAX: Final = 128


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation, and its home.

    Attributes:
        model: The id of the model.
        owner: The instance that has it.
        run: The number of the process of it.
        turn_hashes: By which its next turn is known, the oldest first, at most 6.
    """

    model: str
    owner: str
    run: int
    turn_hashes: deque[int] = field(default_factory=deque)


class Conversations:
    """Conversations of all models.

    Args:
        most: Marks that are remembered at most, at least 1.
        is_alive: Whether the process that has a conversation still runs.
    """

    def __init__(self, most: int, is_alive: Callable[[Conversation], bool]) -> None:
        self._most = most
        self._is_alive = is_alive
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()
        self._latest: dict[str, OrderedDict[Conversation, None]] = {}

    def __len__(self) -> int:
        return len(self._conversations)

    def get(self, mark: int) -> Conversation | None:
        """Return the conversation of a mark, be its process alive or not."""
        return self._conversations.get(mark)

    def find(self, marks: Iterable[int]) -> Conversation | None:
        """Return the conversation of the first mark that is of one whose process is alive."""
        found = map(self._conversations.get, marks)
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

    def add_turn(self, conversation: Conversation, mark: int) -> None:
        """Have a conversation known by one more mark; its oldest is forgotten for it."""
        if self._conversations.get(mark) is not conversation:
            conversation.turn_hashes.append(mark)
            self._conversations[mark] = conversation
        self._conversations.move_to_end(mark)
        if len(conversation.turn_hashes) > _MARKS_EACH:
            self._remove_turn(conversation, conversation.turn_hashes.popleft())
        while len(self._conversations) > self._most:
            self._conversations.popitem(last=False)

    def _remove_turn(self, conversation: Conversation, mark: int) -> None:
        if self._conversations.get(mark) is conversation:
            del self._conversations[mark]
