"""A model of an engine's host cache (`--cache-ram`): its copies by order and bytes. Pure.

It holds for engines that match no prompts (`--slot-prompt-similarity 0`) and have a cache for each
slot (`--no-kv-unified`). They keep one list of copies, oldest first:

- After a task has got its slot, each idle slot is copied to the end of the list, in order of slot
  ids. An existing copy keeps its place. A copy that the new one contains (the turn before) is
  removed.
- A task that names no slot gets the least recently used slot, which is copied first. Then the
  copies are compared, oldest first: a copy is better than the slot, or than the best copy so far,
  if the prompt shares more tokens with it and a larger share of it is kept, at least a quarter. The
  best copy is moved into the slot and leaves the list. So a new conversation that begins like an
  old one takes its copy.
- A task that names its slot, even with no tokens, copies and moves nothing for that slot: its
  content since the last task is lost. One with neither name nor tokens copies all idle slots.
- The oldest copies are dropped until the new one fits; a copy above the limit is not made and drops
  nothing. With `--cache-ram -1` the limit is the tokens of all slots together.

The 12 to 16 bytes per token that a copy takes beside the KV cache are neglected. A copy of a
recurrent model has checkpoints with a state each: two after a prompt, and one more per turn.

The caller notes events in the order in which requests are sent: `note_slot_taken` for a request
that names no slot, then `note_copies` with the content of all other idle slots; `note_found` when a
response reports its cached tokens; `note_return` when a conversation comes that is in no slot.

Source: llama.cpp, tools/server: server-task.cpp, server_prompt_cache (`alloc`, `load`, `update`);
server-context.cpp, get_available_slot and process_single_task. Measured on build 10434 with its log
at level 5 and by `scripts/host_cache_check`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from proxy.cache.holders import Conversation
from proxy.cache.prompt import BLOCK_TOKENS, continues, shared_blocks
from proxy.upstream.upstream import average

# Conversations return after minutes or hours, so about the last ten count.
_WEIGHT: Final = 0.1
# Above this the oldest are forgotten.
_EVICTED_MAX: Final = 4096


class EvictedConversations:
    """Conversations that one cache evicted and that have not returned yet."""

    def __init__(self) -> None:
        self.size_bytes = 0.0
        # Share of recently returned conversations that were gone; None before any has returned.
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
        self.size_bytes -= self._sizes_bytes.pop(conversation, 0.0)

    def note_return(self, conversation: object, expected_share: float, *, is_absent: bool) -> None:
        """Note whether a returning conversation is gone; `expected_share` is the first estimate."""
        before = expected_share if self.absent_share is None else self.absent_share
        self.absent_share = before + _WEIGHT * (is_absent - before)
        self.remove(conversation)


class SlotContent(NamedTuple):
    """The believed content of a slot or copy."""

    conversation: Conversation | None = None  # None if it will not be continued.
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    # For a restored slot that was not used since: number of its last task; while it is unchanged,
    # so is the content. None otherwise.
    task: int | None = None
    is_saved: bool = False  # Whether a file has all of it.


EMPTY: Final = SlotContent()

# Share of a slot's or copy's content that a prompt begins with, and its tokens.
Match = tuple[float, int]
NONE: Final[Match] = (0.0, 0)


class PromptMatcher:
    """Compares one prompt with many slots and copies; `conversation` is None for a new one."""

    def __init__(self, conversation: object | None, blocks: Sequence[int]) -> None:
        self._conversation = conversation
        self._blocks = blocks
        self._shared = 0  # a guess from the last comparison: most share a system prompt

    def match(self, held: SlotContent) -> Match:
        is_own = self._conversation is not None and held.conversation == self._conversation
        if is_own and continues(self._blocks, held.blocks):
            return 1.0, held.tokens
        if not (shared_blocks := self._shared_blocks(held.blocks)):
            return NONE
        # On average half of the next block is shared; nearly all of it if it is the same
        # conversation, edited, rather than one with the same beginning.
        part = BLOCK_TOKENS - 1 if is_own else BLOCK_TOKENS // 2
        shared = min(held.tokens, shared_blocks * BLOCK_TOKENS + part)
        return shared / max(1, held.tokens), shared

    def _shared_blocks(self, others: Sequence[int]) -> int:
        ours, shared = self._blocks, self._shared
        if not ours or not others or ours[0] != others[0]:
            return 0
        is_within = 0 < shared < min(len(ours), len(others))
        if (
            not is_within
            or ours[shared - 1] != others[shared - 1]
            or ours[shared] == others[shared]
        ):
            self._shared = shared = shared_blocks(ours, others)
        return shared


# Source: server_prompt_cache::load, "don't trash large prompts".
_KEPT_MIN: Final = 0.25
# The last token of an answer is not in the cache, nor is its end token.
TOKENS_AWAY_MAX: Final = 2
# The state and its checkpoints.
_STATES: Final = 4
# Below this share of hits, nothing in the cache is believed.
_TRUSTED: Final = 0.5
# Above this the oldest are dropped.
_COPIES_MAX: Final = 1024
# Tasks that await their response; more than slots, because some are cut off.
_MOVES_MAX: Final = 64


@dataclass(slots=True, eq=False)
class _Copy:
    content: SlotContent
    size_bytes: float
    number: int

    @property
    def conversation(self) -> Conversation | None:
        return self.content.conversation


# A copy that may have been moved into a task's slot; it was used if the engine found more tokens
# than this; whether the copy is already removed from our list.
_Move = tuple[_Copy, float, bool]


class HostCache:
    """The host cache of one process.

    Args:
        limit_bytes: Above 0; infinity: no limit.
        token_bytes: Bytes of a token in the KV cache, above 0.
        state_bytes: Bytes of a sequence's recurrent state.
    """

    def __init__(self, limit_bytes: float, token_bytes: float, state_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        self._copies: dict[_Copy, None] = {}
        self._latest: dict[object, _Copy] = {}
        self._moves: dict[object, _Move] = {}
        self._count = count()
        self.used_bytes = 0.0
        self._evicted = EvictedConversations()
        self._hit_share = 1.0

    @property
    def copied_tokens(self) -> list[int]:
        return [copy.content.tokens for copy in self._copies]

    @property
    def conversations(self) -> int:
        return len(self._latest)

    @property
    def is_trusted(self) -> bool:
        """Whether most conversations recently expected in the cache were found there."""
        return self._hit_share >= _TRUSTED

    def holds(self, conversation: object | None) -> int:
        """Return the tokens of a conversation's copy, 0 without one."""
        found = self._latest.get(conversation)
        return found.content.tokens if found else 0

    def search(
        self, slot: SlotContent, conversation: object | None, blocks: Sequence[int]
    ) -> SlotContent:
        """Return the slot or copy that a task without a named slot continues from in this slot."""
        copy, (kept_share, _), _ = self._best(slot, conversation, blocks)
        return copy.content if copy and kept_share >= _KEPT_MIN else slot

    def absence_probability(self, tokens: int) -> float:
        """Return the probability that a conversation of this size is gone when it returns.

        Before any conversation has returned, it is estimated from the bytes that were evicted, and
        those that will be once as many bytes again have come.
        """
        size_bytes = self._size(tokens)
        if size_bytes > self._limit_bytes:
            return 1.0
        if self._evicted.absent_share is not None:
            return self._evicted.absent_share
        seen_bytes = self.used_bytes + self._evicted.size_bytes
        return seen_bytes / (seen_bytes + self._limit_bytes - size_bytes) if seen_bytes else 0.0

    # What happens.

    def note_copies(self, idle: Iterable[SlotContent]) -> None:
        for held in idle:
            if held.conversation is not None and held.tokens != self.holds(held.conversation):
                self._add(held)

    def note_slot_taken(
        self, slot: SlotContent, conversation: object | None, blocks: Sequence[int]
    ) -> None:
        """Note that a task without a named slot gets this one.

        `slot` is its content before; `conversation` is None if unknown.
        """
        self.note_copies((slot,))
        copy, (kept_share, tokens), own_tokens = self._best(slot, conversation, blocks)
        if copy is None:
            return
        if is_believed := kept_share >= _KEPT_MIN:
            self._remove(copy)
        if conversation is not None:
            self._moves[conversation] = copy, (own_tokens + tokens) / 2, is_believed
            if len(self._moves) > _MOVES_MAX:
                del self._moves[next(iter(self._moves))]

    def note_found(self, conversation: object, cached_tokens: int) -> None:
        """Note how many tokens of a task's prompt the engine found in its cache."""
        if move := self._moves.pop(conversation, None):
            # Our belief whether the copy was moved is uncertain near the limit of a quarter.
            moved, least_tokens, is_believed = move
            was_moved = cached_tokens > least_tokens
            if was_moved and not is_believed and moved in self._copies:
                self._remove(moved)
            elif is_believed and not was_moved:
                self._put_back(moved)
            if moved.conversation == conversation and is_believed:
                self._hit_share = average(self._hit_share, float(was_moved))
        copy = self._latest.get(conversation)
        # The client changed the prompt, for instance left out the answer's reasoning: this turn's
        # copy will not contain the old one.
        if copy and cached_tokens < copy.content.tokens - TOKENS_AWAY_MAX:
            del self._latest[conversation]

    def note_return(self, conversation: object) -> None:
        """Note a returning conversation that is in no slot, before it is sent."""
        is_held = conversation in self._latest
        if is_held or conversation in self._evicted:
            expected = self.absence_probability(0)
            self._evicted.note_return(conversation, expected, is_absent=not is_held)
        if is_held and not self.is_trusted:  # otherwise the cache would never be tried again
            self._hit_share = average(self._hit_share, 1.0)

    def _best(
        self, slot: SlotContent, conversation: object | None, blocks: Sequence[int]
    ) -> tuple[_Copy | None, Match, int]:
        """Return the copy that fits a prompt better than the slot, or else the closest to that.

        Also its match, and the tokens of the prompt in the slot.
        """
        matcher = PromptMatcher(conversation, blocks)
        best = own = matcher.match(slot) if slot.tokens else (-1.0, 0)
        near, best_copy, near_copy = NONE, None, None
        for copy in self._copies:
            fit = kept_share, tokens = matcher.match(copy.content)
            if kept_share < _KEPT_MIN:
                if kept_share > near[0] and tokens > own[1]:
                    near, near_copy = fit, copy
            elif kept_share > best[0] and tokens > best[1]:
                best, best_copy = fit, copy
        return (best_copy, best, own[1]) if best_copy else (near_copy, near, own[1])

    def _put_back(self, copy: _Copy) -> None:
        if again := self._latest.get(copy.conversation):
            if again.content.tokens != copy.content.tokens:
                return
            self._remove(again)
        self._append(copy)
        self._copies = dict.fromkeys(sorted(self._copies, key=attrgetter("number")))
        self._make_room(0)

    def _add(self, held: SlotContent) -> None:
        size_bytes = self._size(held.tokens)
        if size_bytes > self._limit_bytes:
            return
        before = self._latest.get(held.conversation)
        if before and continues(held.blocks, before.content.blocks):
            self._remove(before)
        self._make_room(size_bytes)
        self._append(_Copy(held, size_bytes, next(self._count)))
        self._evicted.remove(held.conversation)

    def _append(self, copy: _Copy) -> None:
        self._copies[copy] = None
        self._latest[copy.conversation] = copy
        self.used_bytes += copy.size_bytes

    def _make_room(self, size_bytes: float) -> None:
        full_bytes = self._limit_bytes - size_bytes
        while self._copies and (self.used_bytes > full_bytes or len(self._copies) >= _COPIES_MAX):
            oldest = next(iter(self._copies))
            is_latest = self._latest.get(oldest.conversation) is oldest
            self._remove(oldest)
            if is_latest:
                self._evicted.add(oldest.conversation, oldest.size_bytes)

    def _remove(self, copy: _Copy) -> None:
        del self._copies[copy]
        self.used_bytes -= copy.size_bytes
        if self._latest.get(copy.conversation) is copy:
            del self._latest[copy.conversation]

    def _size(self, tokens: int) -> float:
        return tokens * self._token_bytes + _STATES * self._state_bytes
