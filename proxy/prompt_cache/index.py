"""What the instances' caches are believed to hold, and which instance owns which conversation.

Beliefs are hints: noted when a request is given to an instance, weighed by what responses report of
its cache, and forgotten when its process is replaced. A withdrawn instance that is admitted again
as the same process still has its cache. All of it is bounded: what was used least recently goes
first, of a prompt its end before its prefix. What other machines say of theirs is believed less.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Any, Final

from proxy.prompt_cache.conversations import Conversation, Conversations
from proxy.prompt_cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.prompt_cache.prefix_digest import PrefixDigests
from proxy.prompt_cache.prompt import BLOCK_TOKENS, Prompt
from proxy.prompt_cache.remote_prefixes import RemotePrefixes
from proxy.prompt_cache.slot_map import SlotMap, TrackedSlot
from proxy.upstream.slots import SlotState
from proxy.upstream.timings import Timings, average
from proxy.upstream.upstream import Upstream

# Each conversation has some turn hashes and dozens of blocks.
_BLOCKS_PER_HASH: Final = 8


@dataclass(slots=True, eq=False)
class _Run:
    """One process of an instance.

    Attributes:
        resumable_prompts: As of `Upstream`.
        hit_ratio: Share of the tokens expected in its cache that were there, lately; 0 to 1.
    """

    identity: tuple[object, ...]
    number: int
    slot_map: SlotMap
    resumable_prompts: int
    hit_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What is believed of the caches for one prompt at one moment.

    Attributes:
        owner: The instance that has the conversation, or None.
        cached_tokens: Tokens of the prompt that each instance holds, by its name.
        conversation: None for a new one.
    """

    owner: str | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    conversation: Conversation | None = None


NO_HINT: Final = CacheHint()


class PrefixIndex:
    """The beliefs about all instances, in at most `prefix_index_max_blocks` blocks of prompts.

    Attributes:
        digests: What other machines are told of the instances of this one.
        remote: What other machines tell of theirs.
    """

    def __init__(
        self, prefix_index_max_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.digests = PrefixDigests(clock)
        self.remote = RemotePrefixes(prefix_index_max_blocks)
        self._clock = clock
        self._blocks: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._conversations = Conversations(
            max(1, prefix_index_max_blocks // _BLOCKS_PER_HASH), self._is_alive
        )
        self._blocks_max = prefix_index_max_blocks
        self._runs: dict[str, _Run] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._blocks) + len(self._conversations)

    def register(self, upstream: Upstream, filled: Iterable[RestoredSlot] = ()) -> None:
        """Note that an instance is admitted; a new process holds what it was filled with."""
        # A supervisor gives each run a key of its own.
        identity = (upstream.api_key, upstream.socket, upstream.host, upstream.port)
        before = self._runs.get(upstream.name)
        if before is None or before.identity != identity:
            number, slot_map = next(self._numbers), SlotMap(upstream.slots)
            run = _Run(identity, number, slot_map, upstream.resumable_prompts)
            self._runs[upstream.name] = run
            self.digests.forget(upstream.name)
            for one in sorted(filled, key=attrgetter("task")):
                run.slot_map.add_restored(one, self._restored(upstream, run, one.fingerprint))

    def slot_map(self, name: str) -> SlotMap:
        return self._runs[name].slot_map

    # Questions.

    def look_up(
        self, names: Iterable[str], prompt: Prompt | None, session: int | None
    ) -> CacheHint:
        if prompt is None:
            return NO_HINT
        hashes = (*reversed(prompt.turn_hashes), session)
        conversation = self._conversations.find(one for one in hashes if one is not None)
        tokens = {name: self._cached_tokens(name, prompt) for name in names}
        hint = CacheHint(conversation.owner if conversation else None, tokens, conversation)
        return self._with_remote(hint, prompt) if self.remote else hint

    def conversations_per_instance(self, model: str) -> Mapping[str, int]:
        """Return how many of the latest conversations of a model each instance owns."""
        counts: dict[str, int] = {}
        for conversation in self._conversations.latest(model):
            counts[conversation.owner] = counts.get(conversation.owner, 0) + 1
        return counts

    def fingerprints(
        self, name: str, listed: Sequence[SlotState], now_s: float
    ) -> dict[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots; `listed` is its /slots now."""
        if (run := self._runs.get(name)) is None:
            return {}
        held = run.slot_map.idle_conversations(listed, now_s)
        return {slot: self._fingerprint(name, run, tracked) for slot, tracked in held.items()}

    # What happens.

    def assign(
        self, upstream: Upstream, prompt: Prompt, session: int | None, hint: CacheHint
    ) -> Conversation:
        """Note that a prompt is given to an instance, which owns its conversation from now on.

        Returns the conversation: the same object for each of its turns.
        """
        run = self._runs[upstream.name]
        conversation = hint.conversation or Conversation(upstream.model, upstream.name, run.number)
        conversation.owner, conversation.run = upstream.name, run.number
        self._conversations.add_turn(conversation, prompt.turn_hashes[-1])
        if session is not None:
            self._conversations.add_turn(conversation, session)
        self._conversations.touch(conversation)
        self._add_prefix(upstream.name, prompt.blocks)
        return conversation

    def record(
        self,
        name: str,
        prompt: Prompt,
        expected_cached: int,
        timings: Timings | None,
        reply: Mapping[str, Any] | None,
    ) -> None:
        """Note how an instance answered a prompt, of which `expected_cached` tokens were expected.

        `reply` is the assistant's message, which identifies the next turn.
        """
        if timings:
            if run := self._runs.get(name):
                # Its cache may have little room. With nothing expected, there is nothing to doubt.
                found = timings.cached_tokens / expected_cached if expected_cached else 1.0
                run.hit_ratio = average(run.hit_ratio, min(1.0, found))
            self._add_prefix(name, prompt.blocks)
        if reply and (conversation := self._conversations.get(prompt.turn_hashes[-1])):
            self._conversations.add_turn(conversation, prompt.hash_with_reply(reply))

    def _add_prefix(self, name: str, blocks: Sequence[int]) -> None:
        """Note that an instance holds a prompt, computed or restored."""
        if (run := self._runs.get(name)) is None:
            return
        if run.resumable_prompts:
            self._forget_earlier(run, blocks)
            blocks = blocks[-1:]
        alone = (run.number,)  # shared: most blocks have one holder
        # The end first, so that it is also the first to be forgotten.
        for block in reversed(blocks):
            holders = self._blocks.get(block, ())
            if run.number not in holders:
                self._blocks[block] = self._alive(holders) + alone if holders else alone
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)

    def _forget_earlier(self, run: _Run, blocks: Sequence[int]) -> None:
        """Forget the ends of earlier prompts of a conversation that can no longer be resumed."""
        ends = [one for one in blocks[:-1] if run.number in self._blocks.get(one, ())]
        for end in ends[: len(ends) - run.resumable_prompts + 1]:
            self._blocks[end] = tuple(one for one in self._blocks[end] if one != run.number)

    def _restored(
        self, upstream: Upstream, run: _Run, fingerprint: ConversationFingerprint
    ) -> Conversation | None:
        """Return a conversation that a process begins with; None where it continued elsewhere."""
        self._add_prefix(upstream.name, fingerprint.blocks)
        other = self._conversations.find(fingerprint.turn_hashes)
        if not fingerprint.turn_hashes or (other and other.run != run.number):
            return None
        conversation = Conversation(upstream.model, upstream.name, run.number)
        for turn_hash in fingerprint.turn_hashes:
            self._conversations.add_turn(conversation, turn_hash)
        self._conversations.touch(conversation)
        return conversation

    def _fingerprint(self, name: str, run: _Run, tracked: TrackedSlot) -> ConversationFingerprint:
        conversation = tracked.conversation
        if isinstance(conversation, Conversation) and (conversation.owner, conversation.run) == (
            name,
            run.number,
        ):
            return ConversationFingerprint(tuple(conversation.turn_hashes), tracked.blocks)
        return ConversationFingerprint((), tracked.blocks)  # it went on elsewhere

    def _with_remote(self, hint: CacheHint, prompt: Prompt) -> CacheHint:
        """Add what other machines say; an owner only where it has a later turn than ours."""
        remote, known = self.remote.find(prompt, self._clock()), hint.cached_tokens
        tokens = {
            name: max(known[name], round(held * self._runs[name].hit_ratio))
            for name, held in remote.tokens.items()
            if name in known
        }
        is_later = remote.owner in known and not self._conversations.find(
            prompt.turn_hashes[remote.turn :]
        )
        owner = remote.owner if is_later else hint.owner
        return replace(hint, owner=owner, cached_tokens={**known, **tokens})

    def _cached_tokens(self, name: str, prompt: Prompt) -> int:
        if (run := self._runs.get(name)) is None:
            return 0
        held = min(self._held(run, prompt) * BLOCK_TOKENS, prompt.tokens)
        return round(held * run.hit_ratio)

    def _held(self, run: _Run, prompt: Prompt) -> int:
        blocks, holders, number = prompt.blocks, self._blocks, run.number
        if run.resumable_prompts:  # only the last block of each prompt is noted
            lengths = range(len(blocks), 0, -1)
            return next((at for at in lengths if number in holders.get(blocks[at - 1], ())), 0)
        # An instance that holds a block holds all before it: search for the first missing one.
        return bisect_left(
            range(len(blocks)), 1, key=lambda at: number not in holders.get(blocks[at], ())
        )

    def _alive(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        numbers = {run.number for run in self._runs.values()}
        return tuple(one for one in holders if one in numbers)

    def _is_alive(self, conversation: Conversation) -> bool:
        run = self._runs.get(conversation.owner)
        return run is not None and run.number == conversation.run
