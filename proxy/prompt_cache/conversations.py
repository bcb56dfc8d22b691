"""Conversations by the hashes of their last turns. Bounded: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from proxy.prompt_cache.latest_conversations import LatestConversations
from proxy.prompt_cache.no_file import NoFile
from proxy.prompt_cache.runs import Run

# The ends of its last turns, and its own name if it has one.
_TURNS_MAX: Final = 6


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and its owner.

    Attributes:
        run: The process of its owner, whose cache holds it.
        turn_hashes: Which identify its next turn, the oldest first, at hashes_max 6.
        number: Of this process; says nothing of the text.
        no_file: Why its latest turn was not saved when it could have been; None: it was, or never
            could.
    """

    model: str
    run: Run
    turn_hashes: list[int] = field(default_factory=list)
    number: int = field(default_factory=count(1).__next__)
    no_file: NoFile | None = None

    @property
    def owner(self) -> str:
        """The instance."""
        return self.run.name


class Conversations:
    """Conversations of all models, with at hashes_max `hashes_max` hashes.

    `is_alive` returns whether a process still runs.
    """

    def __init__(self, hashes_max: int, is_alive: Callable[[Run], bool]) -> None:
        self._hashes_max = hashes_max
        self._is_alive = is_alive
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()
        self._latest: dict[str, LatestConversations] = {}

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
                if conversation and self._is_alive(conversation.run)
            ),
            None,
        )

    def latest(self, model: str) -> LatestConversations:
        """Return how many of the latest conversations of a model each process owns."""
        latest = self._latest.get(model)
        if latest is None:
            latest = self._latest[model] = LatestConversations()
        return latest

    def forget(self, ended: int) -> None:
        """Count those of a set of processes no longer."""
        for latest in self._latest.values():
            latest.forget(ended)

    def add_turn(self, conversation: Conversation, turn_hash: int) -> None:
        """Identify a conversation by one more hash, and no longer by its oldest."""
        if self._conversations.get(turn_hash) is not conversation:
            conversation.turn_hashes.append(turn_hash)
            self._conversations[turn_hash] = conversation
        self._conversations.move_to_end(turn_hash)
        if len(conversation.turn_hashes) > _TURNS_MAX:
            self._remove_turn(conversation, conversation.turn_hashes.pop(0))
        while len(self._conversations) > self._hashes_max:
            self._conversations.popitem(last=False)

    def remove(self, conversation: Conversation) -> None:
        """Forget a conversation: its next turn begins a new one."""
        for turn_hash in conversation.turn_hashes:
            self._remove_turn(conversation, turn_hash)
        conversation.turn_hashes.clear()

    def _remove_turn(self, conversation: Conversation, turn_hash: int) -> None:
        if self._conversations.get(turn_hash) is conversation:
            del self._conversations[turn_hash]
