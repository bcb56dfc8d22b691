"""What an engine's host cache (`--cache-ram`) holds, by bytes and order. Pure.

Such an engine matches no prompts (`--slot-prompt-similarity 0`) and has a cache for each slot
(`--no-kv-unified`). It has one list of copies, the oldest first:

- When a task begins, each idle slot is copied to the end of the list, in the order of their
  numbers, after the task has got its own slot. A copy that is there already stays where it is. One
  that another contains (the turn before) is removed.
- A task that names no slot gets the one used longest ago, which is copied first. Then the copies
  are read, the oldest first: one is better than the slot, or than the best so far, if the prompt
  shares more with it and more of it is kept, at least a quarter. The best one is moved into the
  slot: it is in the list no more. So a new conversation that begins like an old one takes its copy.
- A task that names its slot, also one of no tokens, copies and moves nothing for it: what that slot
  held since the last task is lost.
- The oldest copies go until the new one fits; one above the limit is not made, and removes nothing.
  With `--cache-ram -1` all of them have as many tokens as all slots together.

A copy takes 12 to 16 bytes for each token beside the KV cache, which is neglected. That of a
recurrent model has checkpoints with a state each: two after a prompt, and one more for each turn.

The router calls, in the order in which requests are sent: `taken` for one that names no slot, then
`slots_copied` with what all other idle slots hold; `found` when a response tells what was cached;
`returned` when a conversation comes that is in none of its slots. `SlotMap` does the first two.
`EvictedConversations` counts how many of the conversations that returned were gone; `PromptMatcher`
compares what is held with the beginning of a prompt.

Source: llama.cpp, tools/server: server-task.cpp, server_prompt_cache (`alloc`, `load`, `update`);
server-context.cpp, get_available_slot and process_single_task. Measured on build 10434 with its log
at level 5 and by `scripts/host_cache_check`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from proxy.cache.prompt import BLOCK_TOKENS
from proxy.upstream.timings import average

# Conversations return after minutes or hours: the last ten or so count.
_WEIGHT: Final = 0.1
# Beyond that the oldest are forgotten.
_EVICTED_MAX: Final = 4096


class EvictedConversations:
    """Those of one cache that have not returned yet.

    Attributes:
        size_bytes: That they had in all.
        absent_share: Of those that returned lately, the share that was gone; None before any has.
    """

    def __init__(self) -> None:
        self.size_bytes = 0.0
        self.absent_share: float | None = None
        self._sizes_bytes: OrderedDict[object, float] = OrderedDict()

    def __contains__(self, conversation: object) -> bool:
        return conversation in self._sizes_bytes

    def add(self, conversation: object, size_bytes: float) -> None:
        self.remove(conversation)
        self._sizes_bytes[conversation] = size_bytes
        self.size_bytes += size_bytes
        if len(self._sizes_bytes) > _EVICTED_MAX:
            self.remove(next(iter(self._sizes_bytes)))

    def remove(self, conversation: object) -> None:
        """Nothing where it is not known."""
        self.size_bytes -= self._sizes_bytes.pop(conversation, 0.0)

    def returned(self, conversation: object, expected_share: float, *, is_absent: bool) -> None:
        """Note whether one that returns is gone; `expected_share` is believed before any has."""
        before = expected_share if self.absent_share is None else self.absent_share
        self.absent_share = before + _WEIGHT * (is_absent - before)
        self.remove(conversation)


class Held(Protocol):
    """What a slot holds: `TrackedSlot` or `SlotContent`."""

    @property
    def conversation(self) -> object | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...


class Match(NamedTuple):
    """The share of what is held that a prompt begins with, and its tokens."""

    kept: float
    tokens: int


NONE: Final = Match(0.0, 0)


class PromptMatcher:
    """Compares one prompt with much that is held; its conversation is None for a new one."""

    def __init__(self, conversation: object | None, blocks: Sequence[int]) -> None:
        self._conversation = conversation
        self._blocks = blocks
        self._shared = 0  # by most of what was compared last: they share a system prompt

    def match(self, held: Held) -> Match:
        is_own = self._conversation is not None and held.conversation == self._conversation
        if is_own and continues(self._blocks, held.blocks):
            return Match(1.0, held.tokens)
        if not (shared_blocks := self._shared_blocks(held.blocks)):
            return NONE
        # Half of the next block is shared on average; more by an edited conversation than by those
        # that only begin like it.
        part = BLOCK_TOKENS - 1 if is_own else BLOCK_TOKENS // 2
        shared = min(held.tokens, shared_blocks * BLOCK_TOKENS + part)
        return Match(shared / max(1, held.tokens), shared)

    def _shared_blocks(self, others: Sequence[int]) -> int:
        """Return how many blocks are shared: each hash includes all before it."""
        ours, shared = self._blocks, self._shared
        if not ours or not others or ours[0] != others[0]:
            return 0
        least = min(len(ours), len(others))
        is_guessed = 0 < shared < least and ours[shared - 1] == others[shared - 1]
        if not is_guessed or ours[shared] == others[shared]:
            differs = range(least)
            shared = bisect_left(differs, 1, key=lambda at: ours[at] != others[at])
            self._shared = shared
        return shared


def continues(blocks: Sequence[int], before: Sequence[int]) -> bool:
    """Return whether a prompt begins with all of another one."""
    return len(before) <= len(blocks) and (not before or blocks[len(before) - 1] == before[-1])


# Source: server_prompt_cache::load, "don't trash large prompts".
_KEPT_MIN: Final = 0.25
# The last token of an answer is not in the cache, nor is the one that ends it.
_TOKENS_AWAY_MAX: Final = 2
# A state, and its checkpoints.
_STATES: Final = 4
# With a smaller share found, nothing is believed.
_TRUSTED: Final = 0.5
# Beyond that the oldest go.
_COPIES_MAX: Final = 1024
# Tasks whose responses are awaited: more than there are slots, as some are cut off.
_MOVES_MAX: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    conversation: object
    tokens: int
    blocks: tuple[int, ...]
    size_bytes: float
    number: int


@dataclass(frozen=True, slots=True)
class _Move:
    """A copy that a task may have got.

    Attributes:
        least_tokens: With more found, it was this copy.
        is_believed: Whether it is removed already.
    """

    copy: _Copy
    least_tokens: float
    is_believed: bool


_number = attrgetter("number")


class HostCache:
    """The host cache of one process.

    Args:
        limit_bytes: Above 0; infinity: no limit.
        token_bytes: Of a token in the KV cache, above 0.
        state_bytes: Of the recurrent state of a sequence.
    """

    def __init__(self, limit_bytes: float, token_bytes: float, state_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._copies: dict[_Copy, None] = {}
        self._latest: dict[object, _Copy] = {}
        self._moves: dict[object, _Move] = {}
        self._count = count()
        self._used_bytes = 0.0
        self._evicted = EvictedConversations()
        self._hit_share = 1.0

    @property
    def copied_tokens(self) -> list[int]:
        """The tokens of each copy, the oldest first."""
        return [copy.tokens for copy in self._copies]

    @property
    def conversations(self) -> int:
        """How many it has a copy of."""
        return len(self._latest)

    @property
    def used_bytes(self) -> float:
        return self._used_bytes

    @property
    def is_trusted(self) -> bool:
        """Whether most conversations that were believed to be there lately were found."""
        return self._hit_share >= _TRUSTED

    def holds(self, conversation: object | None) -> int:
        """Return how many tokens of a conversation are there."""
        found = self._latest.get(conversation)
        return found.tokens if found else 0

    def search(self, slot: Held, conversation: object | None, blocks: Sequence[int]) -> Held:
        """Return the slot or the copy from which a task goes on that gets this slot unnamed."""
        matcher = PromptMatcher(conversation, blocks)
        own = matcher.match(slot) if slot.tokens else Match(-1.0, 0)
        copy, fit = self._best(own, matcher)
        return copy if copy and fit.kept >= _KEPT_MIN else slot

    def absence_probability(self, tokens: int) -> float:
        """Return how likely so many tokens are gone from here when their conversation returns.

        Before any has returned: as likely as one is in what was evicted, or will be when as much
        again has come.
        """
        size_bytes = self._size(tokens)
        if size_bytes > self._limit_bytes:
            return 1.0
        if self._evicted.absent_share is not None:
            return self._evicted.absent_share
        seen_bytes = self._used_bytes + self._evicted.size_bytes
        return seen_bytes / (seen_bytes + self._limit_bytes - size_bytes) if seen_bytes else 0.0

    # What happens.

    def slots_copied(self, idle: Iterable[Held]) -> None:
        """Note that a task begins in another slot than these, which are idle."""
        for held in idle:
            if held.conversation is not None and held.tokens != self.holds(held.conversation):
                self._add(held.conversation, held)

    def taken(self, slot: Held, conversation: object | None, blocks: Sequence[int]) -> None:
        """Note that a task names no slot and gets this one.

        Args:
            slot: What it held before.
            conversation: Of the task; None for one that is not known.
            blocks: Of its prompt.
        """
        self.slots_copied((slot,))
        matcher = PromptMatcher(conversation, blocks)
        own = matcher.match(slot) if slot.tokens else Match(-1.0, 0)
        copy, fit = self._best(own, matcher)
        if copy is None:
            return
        move = _Move(copy, (own.tokens + fit.tokens) / 2, fit.kept >= _KEPT_MIN)
        if move.is_believed:
            self._remove(copy)
        if conversation is not None:
            self._moves[conversation] = move
            if len(self._moves) > _MOVES_MAX:
                del self._moves[next(iter(self._moves))]

    def found(self, conversation: object, cached_tokens: int) -> None:
        """Note how many tokens of a task's prompt the engine found."""
        if move := self._moves.pop(conversation, None):
            self._correct(move, cached_tokens)
            if move.copy.conversation == conversation and move.is_believed:
                was_hit = cached_tokens > move.least_tokens
                self._hit_share = average(self._hit_share, float(was_hit))
        copy = self._latest.get(conversation)
        # Such as without the reasoning of the answer: the copy of this turn will not contain it.
        if copy and cached_tokens < copy.tokens - _TOKENS_AWAY_MAX:
            del self._latest[conversation]

    def returned(self, conversation: object) -> None:
        """Note that a conversation comes that is in no slot, before it is sent."""
        is_held = conversation in self._latest
        if is_held or conversation in self._evicted:
            expected = self.absence_probability(0)
            self._evicted.returned(conversation, expected, is_absent=not is_held)
        if is_held and not self.is_trusted:  # or none would be looked for again
            self._hit_share = average(self._hit_share, 1.0)

    def _best(self, own: Match, matcher: PromptMatcher) -> tuple[_Copy | None, Match]:
        """Return the copy that fits better than the slot, else the one that nearly does."""
        best, near = own, NONE
        best_copy = near_copy = None
        for copy in self._copies:
            fit = matcher.match(copy)
            if fit.kept < _KEPT_MIN:
                if fit.kept > near.kept and fit.tokens > own.tokens:
                    near, near_copy = fit, copy
            elif fit.kept > best.kept and fit.tokens > best.tokens:
                best, best_copy = fit, copy
        return (best_copy, best) if best_copy else (near_copy, near)

    def _correct(self, move: _Move, cached_tokens: int) -> None:
        """Put right whether a copy was moved, which may be near the limit of a quarter."""
        was_moved = cached_tokens > move.least_tokens
        if was_moved and not move.is_believed and move.copy in self._copies:
            self._remove(move.copy)
        elif move.is_believed and not was_moved:
            self._put_back(move.copy)

    def _put_back(self, copy: _Copy) -> None:
        if again := self._latest.get(copy.conversation):
            if again.tokens != copy.tokens:
                return
            self._remove(again)
        self._append(copy)
        self._copies = dict.fromkeys(sorted(self._copies, key=_number))
        self._make_room(0)

    def _add(self, conversation: object, held: Held) -> None:
        size_bytes = self._size(held.tokens)
        if size_bytes > self._limit_bytes:
            return
        before = self._latest.get(conversation)
        if before and continues(held.blocks, before.blocks):
            self._remove(before)
        self._make_room(size_bytes)
        self._append(_Copy(conversation, held.tokens, held.blocks, size_bytes, next(self._count)))
        self._evicted.remove(conversation)

    def _append(self, copy: _Copy) -> None:
        self._copies[copy] = None
        self._latest[copy.conversation] = copy
        self._used_bytes += copy.size_bytes

    def _make_room(self, size_bytes: float) -> None:
        full_bytes = self._limit_bytes - size_bytes
        while self._copies and (self._used_bytes > full_bytes or len(self._copies) >= _COPIES_MAX):
            oldest = next(iter(self._copies))
            is_latest = self._latest.get(oldest.conversation) is oldest
            self._remove(oldest)
            if is_latest:
                self._evicted.add(oldest.conversation, oldest.size_bytes)

    def _remove(self, copy: _Copy) -> None:
        del self._copies[copy]
        self._used_bytes -= copy.size_bytes
        if self._latest.get(copy.conversation) is copy:
            del self._latest[copy.conversation]

    def _size(self, tokens: int) -> float:
        return tokens * self._token_bytes + _STATES * self._state_bytes
