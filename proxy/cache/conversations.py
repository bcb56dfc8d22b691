"""Conversations, found by the hashes of their last turns; bounded, least recently used go first.

Also counts how many of a model's latest conversations each process owns, for balance.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from proxy.observe.cache_finding import NoFile

# Hit ratios are rounded to this many steps; instances of the same step are looked up together.
RATIO_STEPS: Final = 16


@dataclass(slots=True, eq=False)
class Run:
    """One process of an instance.

    Attributes:
        identity: Values that differ between processes of the same instance.
        bit: A number with one bit set: this run as a set.
        hit_ratio: Recent share of expected cached tokens that the engine found; 0 to 1.
        has_failed: Whether it ended without being stopped.
    """

    name: str
    identity: tuple[object, ...]
    bit: int
    resumable_prompts: int = 0
    cache_key: str = ""
    hit_ratio: float = 1.0
    has_ended: bool = False
    has_failed: bool = False

    @property
    def ratio_step(self) -> int:
        return round(self.hit_ratio * RATIO_STEPS)


@dataclass(frozen=True, slots=True)
class ForgottenConversations:
    """Facts about forgotten conversations, for callers that delete their caches.

    Attributes:
        turn_hashes: Hashes of all their turns, as far as known.
        slots: Idle slots that held them, as (instance, slot id).
    """

    turn_hashes: frozenset[int]
    slots: tuple[tuple[str, int], ...] = ()
    numbers: frozenset[int] = frozenset()


# Only the latest conversations of a model count for balance: older ones fill no slot, and a new
# instance must not get all new ones until it owns as many. With a thousand instances, a limit of
# 128 would leave most of them at zero, and new conversations would go to the same few.
_LATEST_MIN: Final = 128
_LATEST_PER_INSTANCE: Final = 8


class LatestConversations:
    """The latest conversations of one model; the processes of some may have ended.

    Attributes:
        counts: Number of conversations that each process owns.
    """

    def __init__(self) -> None:
        self.counts: Counter[Run] = Counter()
        self._latest: OrderedDict[Conversation, Run] = OrderedDict()
        self._owners: dict[int, int] = {}

    @property
    def owners(self) -> Mapping[int, int]:
        """Sets of processes, by the number of conversations they own (1 and more)."""
        return self._owners

    def touch(self, conversation: Conversation, instances: int) -> None:
        """Count a conversation as the latest, for the process that owns it now.

        The limit grows with the number of instances.
        """
        before, now = self._latest.pop(conversation, None), conversation.run
        self._latest[conversation] = now
        if before is not now:
            self._count(now, 1)
            if before:
                self._count(before, -1)
        if len(self._latest) > max(_LATEST_MIN, _LATEST_PER_INSTANCE * instances):
            _, owner = self._latest.popitem(last=False)
            self._count(owner, -1)

    def forget(self, ended: int) -> None:
        for conversation, run in tuple(self._latest.items()):
            if run.bit & ended:
                del self._latest[conversation]
                self._count(run, -1)

    def _count(self, run: Run, change: int) -> None:
        before = self.counts[run]
        self.counts[run] = now = before + change
        if before:
            self._owners[before] &= ~run.bit
        if now:
            self._owners[now] = self._owners.get(now, 0) | run.bit
        else:
            del self.counts[run]
        if before and not self._owners[before]:
            del self._owners[before]


# A conversation keeps the hashes of its last turns, and that of its session if it has one.
_TURNS_MAX: Final = 6


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and its owner.

    Attributes:
        run: The owning process, whose cache holds it.
        turn_hashes: Hashes that identify its next turn, oldest first, at most 6.
        number: Counted in this proxy process; reveals nothing of the text.
        no_file: Why its latest turn was not saved; None if it was, or if nothing could be saved.
    """

    model: str
    run: Run
    turn_hashes: list[int] = field(default_factory=list)
    number: int = field(default_factory=count(1).__next__)
    no_file: NoFile | None = None

    @property
    def owner(self) -> str:
        return self.run.name


class Conversations:
    """The conversations of all models, with at most `hashes_max` hashes.

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
        for latest in self._latest.values():
            latest.forget(ended)

    def add_turn(self, conversation: Conversation, turn_hash: int) -> None:
        """Add a hash that identifies a conversation, and drop its oldest above 6."""
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
