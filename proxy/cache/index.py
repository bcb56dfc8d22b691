"""Beliefs about the contents of the instances' caches, and about the owner of each conversation.

Beliefs are hints: noted when a request is given to an instance, weighed by the cache hits that
responses report, and forgotten when the process is replaced. A withdrawn instance that is admitted
again as the same process still has its cache. Everything is bounded: the least recently used goes
first, and the end of a prompt before its prefix. Reports of other machines are believed less.

Instances are bits of a number, so a question costs the same for one as for a thousand. The answer
is a `CacheHint`: tokens with the instances that hold them, estimated like the tokens of prompts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot, SlotFile
from proxy.cache.holders import (
    RATIO_STEPS,
    Conversation,
    Conversations,
    PrefixTree,
    RemotePrefixes,
    Run,
    SlotFileIndex,
)
from proxy.cache.host_cache import HostCache, SlotContent
from proxy.cache.miss_cause import RecentPrompts
from proxy.cache.prompt import (
    BLOCK_TOKENS,
    CacheOwner,
    Prompt,
    toggle_model_name,
    toggle_owner,
)
from proxy.cache.remote_prefixes import PrefixDigests
from proxy.cache.save_policy import SlotFileMeasures
from proxy.cache.slot_map import SlotMap
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Timings, Upstream, average

Levels = Sequence[tuple[int, int]]


# Not frozen, as `Prompt`.
@dataclass(slots=True)
class CacheHint:
    """The beliefs about the caches for one prompt at one moment."""

    owner: str | None = None
    # (tokens of the prompt, set of instances that hold as many), most tokens first; an instance is
    # in one set at most. A file counts for all instances that can restore it, less the tokens that
    # could be computed in the time of reading it.
    cached: Levels = ()
    held: Levels = ()  # The same, without files.
    saved: Levels = ()  # The same, of files alone.
    conversation: Conversation | None = None

    def cached_tokens(self, instances: int) -> int:
        return most_tokens(self.cached, instances)


NO_HINT: Final = CacheHint()


def most_tokens(levels: Levels, instances: int) -> int:
    return next((tokens for tokens, holders in levels if holders & instances), 0)


def limit_levels(levels: Levels, some: int, tokens_max: int) -> list[tuple[int, int]]:
    """Return the levels after limiting the instances in `some` to `tokens_max` tokens."""
    kept = [(tokens, holders & ~some) for tokens, holders in levels]
    limited = [(min(tokens, tokens_max), holders & some) for tokens, holders in levels]
    return merge_levels(kept, limited)


def merge_levels(levels: Levels, other: Levels) -> list[tuple[int, int]]:
    """Return for each instance the larger of its tokens in two levels."""
    found, seen = [], 0
    for tokens, holders in sorted((*levels, *other), reverse=True):
        if tokens and (some := holders & ~seen):
            found.append((tokens, some))
        seen |= holders
    return found


# Each conversation has some turn hashes and dozens of blocks.
_ASSISTANT: Final = b"a"
_BLOCKS_PER_HASH: Final = 8
# Ended processes are forgotten in groups of this size, because it takes a scan of all beliefs.
_ENDED_MAX: Final = 64


class PrefixIndex:
    """The beliefs about all instances, in at most `prefix_index_max_blocks` blocks of prompts."""

    def __init__(
        self, prefix_index_max_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Prefixes of this machine's instances, for other machines.
        self.digests = PrefixDigests(clock)
        # Prefixes that other machines report.
        self.remote = RemotePrefixes(prefix_index_max_blocks)
        self.recent = RecentPrompts()
        self.files = SlotFileIndex(prefix_index_max_blocks)
        # Costs and benefits of slot files, by model.
        self.measures: defaultdict[str, SlotFileMeasures] = defaultdict(SlotFileMeasures)
        self._clock = clock
        hashes_max = max(1, prefix_index_max_blocks // _BLOCKS_PER_HASH)
        self._prompts = PrefixTree(prefix_index_max_blocks, hashes_max)
        self._conversations = Conversations(hashes_max)
        self.slot_maps: dict[str, SlotMap] = {}  # The slots of each instance's latest process.
        self.with_files: dict[str, Run] = {}  # The latest processes that can restore slot files.
        self._runs: dict[str, Run] = {}  # The latest process of each instance.
        self._by_ratio: defaultdict[int, int] = defaultdict(int)  # Sets of them by `ratio_step`.
        self._used = self._ended = 0  # Sets of processes: all, and those that are not the latest.

    def __len__(self) -> int:
        return len(self._prompts) + len(self._conversations)

    def register(self, upstream: Upstream, filled: Iterable[RestoredSlot] = ()) -> None:
        """Note that an instance is admitted; a new process holds the slots it was filled with."""
        # The supervisor gives each process its own key.
        identity = (upstream.api_key, upstream.socket, upstream.host, upstream.port)
        name, filled = upstream.name, sorted(filled, key=attrgetter("task"))
        node, before = upstream.node, self._runs.get(name)
        process = (node.process or None) if node else ""
        if before and before.identity == identity:
            before.process = process
            return
        if before:
            self._end(before)
        bit = ~self._used & (self._used + 1)  # the lowest unused one
        self._used |= bit
        resumable, cache_key = upstream.resumable_prompts, upstream.cache_key
        run = self._runs[name] = Run(name, identity, bit, resumable, cache_key, process=process)
        host_cache = None
        if upstream.can_name_slots and upstream.host_cache_bytes and upstream.token_bytes:
            host_cache = HostCache(
                upstream.host_cache_bytes, upstream.token_bytes, upstream.state_bytes
            )
        # Only this proxy and its supervisor know the key of an engine.
        slot_map = self.slot_maps[name] = SlotMap(
            upstream.slots, host_cache, is_empty=not filled, is_shared=not upstream.api_key
        )
        if cache_key:
            self.with_files[name] = run
        self._by_ratio[run.ratio_step] |= bit
        self.digests.forget(name)
        for slot in filled:
            slot_map.add_restored(
                slot, self._restored_conversation(upstream, run, slot.fingerprint)
            )

    def bit(self, name: str) -> int:
        """Return the set of this instance alone, valid until its process changes."""
        return self._runs[name].bit

    def forget(self, name: str) -> None:
        if run := self._runs.pop(name, None):
            del self.slot_maps[name]
            self._end(run)
        self.digests.forget(name)

    def _end(self, run: Run) -> None:
        run.is_latest = False
        self.with_files.pop(run.name, None)
        self._by_ratio[run.ratio_step] &= ~run.bit
        self._ended |= run.bit
        if self._ended.bit_count() >= _ENDED_MAX:  # before their bits are used again
            self._prompts.remove(self._ended)
            self._conversations.forget(self._ended)
            self._used &= ~self._ended
            self._ended = 0

    def run(self, name: str) -> Run | None:
        return self._runs.get(name)

    def note_end(self, name: str, *, has_failed: bool) -> None:
        """Note that the process of an instance ended; `has_failed`: without being stopped."""
        if run := self._runs.get(name):
            run.has_ended, run.has_failed = True, has_failed

    # Questions.

    def look_up(self, prompt: Prompt | None, session: int | None) -> CacheHint:
        if prompt is None:
            return NO_HINT
        hashes = reversed(prompt.turn_hashes)
        # A prompt without answers continues nothing: a client asks for a title in the same session.
        labels = prompt.outline.labels
        name = session if not labels or _ASSISTANT in labels else None
        conversation = self._conversations.find(hashes if name is None else (*hashes, name))
        levels = self._prompts.levels(prompt.blocks)
        held = _expected_tokens(levels, self._by_ratio, prompt.tokens)
        owner = conversation.run.name if conversation else None
        saved: Levels = ()
        if self.with_files:
            if lost := self._runs_without(conversation):
                # Parts that conversations share may be in other slots.
                shared = prompt.tokens_until(prompt.first_own - 1) if prompt.first_own else 0
                held = limit_levels(held, lost, shared)
                owner = None if owner and lost & self._runs[owner].bit else owner
            saved = self._saved_prefixes(prompt, session)
        cached: Levels = merge_levels(held, saved) if saved else held
        if self.remote.holders:
            owner, cached = self._add_remote(prompt, owner, cached)
        return CacheHint(owner, cached, held, saved, conversation)

    def holder(self, hint: CacheHint, name: str, is_serving: Callable[[str], bool]) -> str | None:
        """Return the process that has a conversation, for an instance; None if unknown or its own.

        Empty: it is on this machine. If the instance that answered its last turn does not serve,
        it may have handed the conversation to another, which has reported that.
        """
        run = hint.conversation.run if hint.conversation else self._runs.get(hint.owner or "")
        if run and run.name != name and not is_serving(run.name):
            reported = (bits for _, bits in hint.cached)
            holders = (
                other
                for bits in reported
                for other in self._runs.values()
                if bits & other.bit and is_serving(other.name)
            )
            run = next(holders, run)
        return run.process if run and run.name != name else None

    def available_blocks(self, upstream: Upstream, prompt: Prompt) -> int:
        """Return the blocks of a prompt in an instance's idle slots, host cache or files."""
        slot_map = self.slot_maps.get(upstream.name)
        held = slot_map.held_blocks_max(prompt.blocks) if slot_map else 0
        return max(held, self.saved_blocks(upstream, prompt))

    def saved_blocks(self, upstream: Upstream, prompt: Prompt) -> int:
        """Return the blocks of a prompt that an instance can restore from a file."""
        saved = self.files.find(upstream.cache_key, prompt)
        return saved.blocks if saved else 0

    def held_tokens(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Return (tokens of a prompt, instances that were given as many before)."""
        levels = self._prompts.levels(prompt.blocks)
        return [(min(BLOCK_TOKENS * blocks, prompt.tokens), holders) for blocks, holders in levels]

    def holders(self, blocks: Sequence[int]) -> int:
        """Return the instances that were given a prompt with all these blocks."""
        levels = self._prompts.levels(blocks)
        return next((holders for held, holders in levels if held == len(blocks)), 0)

    def ended_conversation(self, prompt: Prompt) -> Conversation | None:
        """Return the conversation that a prompt continues, if its process has ended."""
        return self._conversations.find(reversed(prompt.turn_hashes), is_latest=False)

    def conversations_per_instance(self, model: str) -> Mapping[str, int]:
        counts = self._conversations.latest[model].counts
        return {run.name: count for run, count in counts.items() if run.is_latest}

    def owners(self, model: str) -> Mapping[int, int]:
        """Return sets of instances by the number of conversations they own (1 and more)."""
        return self._conversations.latest[model].owners

    def fingerprints(
        self, name: str, listed: Sequence[SlotState]
    ) -> dict[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots; `listed` is its /slots now."""
        if name not in self._runs:
            return {}
        held = self.slot_maps[name].idle_conversations(listed, self._clock())
        return {number: self.fingerprint(name, slot.content) for number, slot in held.items()}

    def fingerprint(self, name: str, content: SlotContent) -> ConversationFingerprint:
        """Return the fingerprint of a slot's content; empty if it holds no conversation."""
        run, conversation = self._runs.get(name), content.conversation
        if run is None:
            return ConversationFingerprint()
        if conversation is None:
            return ConversationFingerprint((), content.blocks)
        owner = conversation.run
        is_elsewhere = owner is not run and owner.is_latest and not owner.has_ended
        has_later_turn = is_elsewhere and self.slot_maps[owner.name].holds(conversation)
        hashes = () if has_later_turn else tuple(conversation.turn_hashes)
        return ConversationFingerprint(hashes, content.blocks, conversation.scales)

    def turns(self, request_id: str | None, number: int | None) -> Collection[int]:
        """Return the turn hashes of the conversation of a request, or of that number, if known."""
        found = self.recent.find_conversation(request_id, number)
        return tuple(found.turn_hashes) if found else ()

    def owner(self, fingerprint: ConversationFingerprint) -> str | None:
        conversation = self._conversations.find(fingerprint.turn_hashes)
        return conversation.run.name if conversation else None

    # What happens.

    def note_restored(
        self, conversation: Conversation, prompt: Prompt, file: ConversationFingerprint
    ) -> None:
        """Note that a conversation continues from a file, which its next file then replaces."""
        shared = (turn for turn in file.turn_hashes if turn in prompt.turn_hashes)
        self._conversations.add_earlier_turns(conversation, shared)

    def assign(
        self, upstream: Upstream, prompt: Prompt, session: int | None, hint: CacheHint
    ) -> Conversation:
        """Note that a prompt is given to an instance, which now owns its conversation.

        Returns the conversation: the same object for each turn.
        """
        run = self._runs[upstream.name]
        conversation = hint.conversation or Conversation(upstream.model, run, prompt.scales)
        conversation.run = run
        self._conversations.add_turn(conversation, prompt.turn_hashes[-1])
        if session is not None:
            self._conversations.add_turn(conversation, session)
        self._conversations.latest[upstream.model].touch(conversation, len(self._runs))
        self._add_prefix(run, prompt.blocks)
        return conversation

    def record(
        self,
        name: str,
        prompt: Prompt,
        expected_cached: int,
        timings: Timings | None,
        reply: Mapping[str, Any] | None,
    ) -> None:
        """Note an instance's response to a prompt with `expected_cached` expected cached tokens.

        `reply` is the assistant's message, which identifies the next turn.
        """
        if timings and (run := self._runs.get(name)):
            # A low ratio means that its cache has little room; without expected tokens there is no
            # doubt.
            found = timings.cached_tokens / expected_cached if expected_cached else 1.0
            if found < 1 or run.hit_ratio < 1:
                self._by_ratio[run.ratio_step] &= ~run.bit
                run.hit_ratio = average(run.hit_ratio, min(1.0, found))
                self._by_ratio[run.ratio_step] |= run.bit
        if reply and (conversation := self._conversations.get(prompt.turn_hashes[-1])):
            self._conversations.add_turn(conversation, prompt.hash_with_reply(reply))

    def add_turn(self, conversation: Conversation, prompt: Prompt) -> None:
        """Note that a prompt continues a conversation."""
        self._conversations.add_turn(conversation, prompt.turn_hashes[-1])

    def add_remote(self, upstream: Upstream, hashes: Iterable[int]) -> None:
        """Note the hashes of prompts that a node reports for its model."""
        named = (toggle_model_name(digest, upstream.model) for digest in hashes)
        self.remote.add(upstream.name, named, self._clock())

    def report_file(self, model: str, file: SlotFile, client: str, owner: CacheOwner) -> None:
        """Report a file from another machine to a client, as if its turns were answered here."""
        runs = (run for run in self.with_files.values() if run.cache_key == file.cache_key)
        if self.digests.is_read and (run := next(runs, None)):
            turns = (toggle_owner(turn, owner) for turn in file.fingerprint.turn_hashes)
            self.digests.add(run.name, model, client, turns)

    def forget_conversations(
        self, turn_hashes: Collection[int]
    ) -> tuple[frozenset[int], tuple[tuple[str, int], ...], frozenset[int]]:
        """Forget the conversations of these turns; their next turns begin new ones.

        Returns the hashes of all their turns, as far as known; the idle slots that held them, as
        (instance, slot id); and their numbers.
        """
        found = {known for turn in turn_hashes if (known := self._conversations.get(turn))}
        hashes, slots = {*turn_hashes}, list[tuple[str, int]]()
        for conversation in found:
            hashes.update(conversation.turn_hashes)
            for name, slot_map in self.slot_maps.items():
                if (id_slot := slot_map.forget(conversation)) is not None:
                    slots.append((name, id_slot))
            self._conversations.remove(conversation)
            self.recent.forget(conversation)
        numbers = frozenset(conversation.number for conversation in found)
        return frozenset(hashes), tuple(slots), numbers

    def _add_prefix(self, run: Run, blocks: Sequence[int]) -> None:
        if run.resumable_prompts:
            self._prompts.add_end(blocks, run.bit, run.resumable_prompts)
        else:
            self._prompts.add(blocks, run.bit)

    def _restored_conversation(
        self, upstream: Upstream, run: Run, fingerprint: ConversationFingerprint
    ) -> Conversation | None:
        """Return the conversation of a restored slot; None if it has continued elsewhere.

        Otherwise this process now owns it: the process before will be replaced.
        """
        self._add_prefix(run, fingerprint.blocks)
        if not fingerprint.turn_hashes:
            return None
        conversation = self._conversations.find(fingerprint.turn_hashes)
        if conversation and conversation.run is not run:
            if conversation.turn_hashes[-1] not in fingerprint.turn_hashes:
                return None
            conversation.run = run
        else:
            conversation = Conversation(upstream.model, run, fingerprint.scales)
            for turn_hash in fingerprint.turn_hashes:
                self._conversations.add_turn(conversation, turn_hash)
        self._conversations.latest[upstream.model].touch(conversation, len(self._runs))
        return conversation

    def _runs_without(self, conversation: Conversation | None) -> int:
        """Return the instances with files whose slots and host cache have lost a conversation."""
        if conversation is None:
            return 0
        with_files = self.with_files.items()
        return sum(
            run.bit for name, run in with_files if not self.slot_maps[name].holds(conversation)
        )

    def _saved_prefixes(self, prompt: Prompt, session: int | None) -> list[tuple[int, int]]:
        by_key: defaultdict[str, int] = defaultdict(int)
        for run in self.with_files.values() if len(self.files) else ():
            by_key[run.cache_key] |= run.bit
        found = ((self.files.find(key, prompt, session), runs) for key, runs in by_key.items())
        worth = [(saved.worth_tokens, runs) for saved, runs in found if saved]
        return sorted(((tokens, runs) for tokens, runs in worth if tokens > 0), reverse=True)

    def _add_remote(
        self, prompt: Prompt, owner: str | None, cached: Levels
    ) -> tuple[str | None, Levels]:
        """Add the reports of other machines; their owner counts only if its turn is later."""
        held_by, remote_owner, turn = self.remote.find(prompt, self._clock())
        added, more = dict[int, int](), 0
        for name, held in held_by.items():
            if run := self._runs.get(name):
                tokens = round(held * run.ratio_step / RATIO_STEPS)
                if tokens > most_tokens(cached, run.bit):
                    added[tokens] = added.get(tokens, 0) | run.bit
                    more |= run.bit
        known = ((tokens, holders & ~more) for tokens, holders in cached)
        if remote_owner in self._runs and not self._conversations.find(prompt.turn_hashes[turn:]):
            owner = remote_owner
        return owner, sorted((*known, *added.items()), reverse=True)


def _expected_tokens(
    levels: Levels, by_ratio: Mapping[int, int], tokens_max: int
) -> list[tuple[int, int]]:
    """Return (expected tokens of a prompt, its holders), without levels below one token."""
    deeper, found = 0, []
    for blocks, holders in reversed(levels):
        held = min(blocks * BLOCK_TOKENS, tokens_max)
        for step, runs in by_ratio.items():
            tokens = round(held * step / RATIO_STEPS)
            if tokens and (some := holders & runs & ~deeper):
                found.append((tokens, some))
        deeper |= holders
    found.sort(reverse=True)
    return found
