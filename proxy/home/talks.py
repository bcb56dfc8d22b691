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
class Talk:
    """One conversation, and its home.

    Attributes:
        model: The id of the model.
        home: The instance that has it.
        run: The number of the process of it.
        marks: By which its next turn is known, the oldest first, at most 6.
    """

    model: str
    home: str
    run: int
    marks: deque[int] = field(default_factory=deque)


class Talks:
    """Conversations of all models.

    Args:
        most: Marks that are remembered at most, at least 1.
        is_alive: Whether the process that has a conversation still runs.
    """

    def __init__(self, most: int, is_alive: Callable[[Talk], bool]) -> None:
        self._most = most
        self._is_alive = is_alive
        self._talks: OrderedDict[int, Talk] = OrderedDict()
        self._latest: dict[str, OrderedDict[Talk, None]] = {}

    def __len__(self) -> int:
        return len(self._talks)

    def get(self, mark: int) -> Talk | None:
        """Return the conversation of a mark, be its process alive or not."""
        return self._talks.get(mark)

    def find(self, marks: Iterable[int]) -> Talk | None:
        """Return the conversation of the first mark that is of one whose process is alive."""
        found = map(self._talks.get, marks)
        return next((talk for talk in found if talk and self._is_alive(talk)), None)

    def latest(self, model: str) -> Iterator[Talk]:
        """Return the latest conversations of a model, the oldest first."""
        return filter(self._is_alive, self._latest.get(model, ()))

    def touch(self, talk: Talk) -> None:
        """Count a conversation as the latest of its model."""
        latest = self._latest.setdefault(talk.model, OrderedDict())
        latest[talk] = None
        latest.move_to_end(talk)
        if len(latest) > _LATEST_MAX:
            latest.popitem(last=False)

    def mark(self, talk: Talk, mark: int) -> None:
        """Have a conversation known by one more mark; its oldest is forgotten for it."""
        if self._talks.get(mark) is not talk:
            talk.marks.append(mark)
            self._talks[mark] = talk
        self._talks.move_to_end(mark)
        if len(talk.marks) > _MARKS_EACH:
            self._unmark(talk, talk.marks.popleft())
        while len(self._talks) > self._most:
            self._talks.popitem(last=False)

    def _unmark(self, talk: Talk, mark: int) -> None:
        if self._talks.get(mark) is talk:
            del self._talks[mark]
