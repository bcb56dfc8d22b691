"""Conversations, and who holds most of a prompt: processes, slot files, other machines. Pure.

A conversation is found by the hashes of its last turns. `LatestConversations` counts how many of a
model's latest conversations each process owns, for balance.

A prompt is a sequence of hashes, each of which includes all before it (`proxy.cache.prompt`), so a
block stands for the whole prompt up to its end. Holders are bits of a number, so that a thousand of
them are compared at once. Everything is bounded: the least recently used goes first, and the end of
a prompt before its beginning.

`PrefixTree` tells which holders were given the same blocks. `SlotFileIndex` has a separate tree for
the files that the slot store reports and bounds: a file either belongs to a conversation, is
identified by its turns, and begins with prompts that other conversations may share; or it holds
such a prefix alone, and is small. If only a prompt that continues the whole file can use it, a
prefix is found by its hash. `RemotePrefixes` has the turns that other machines report. Their
reports are beliefs, weaker than our own records; they expire. A decision looks up each turn of its
prompt once, with any number of machines and reports; of the machines that hold the same prefix,
only the latest few count.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from proxy.cache.fingerprint import Scales, SlotFile
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, continues, shared_blocks
from proxy.cache.remote_prefixes import EXPIRES_S
from proxy.observe.cache_finding import NoFile

# Hit ratios are rounded to this many steps; instances of the same step are looked up together.
RATIO_STEPS: Final = 16


@dataclass(slots=True, eq=False)
class Run:
    """One process of an instance."""

    name: str
    identity: tuple[object, ...]  # Values that differ between processes of the same instance.
    bit: int  # A number with one bit set: this run as a set.
    resumable_prompts: int = 0
    cache_key: str = ""
    hit_ratio: float = 1.0  # Recent share of expected cached tokens that the engine found; 0 to 1.
    has_ended: bool = False
    has_failed: bool = False  # Whether it ended without being stopped.
    is_latest: bool = True  # Whether it is the latest process of its instance.
    # The llama-corral that runs it: empty for this one, None if another machine did not tell it.
    process: str | None = ""

    @property
    def ratio_step(self) -> int:
        return round(self.hit_ratio * RATIO_STEPS)


# Only the latest conversations of a model count for balance: older ones fill no slot, and a new
# instance must not get all new ones until it owns as many. With a thousand instances, a limit of
# 128 would leave most of them at zero, and new conversations would go to the same few.
_LATEST_MIN: Final = 128
_LATEST_PER_INSTANCE: Final = 8


class LatestConversations:
    """The latest conversations of one model; the processes of some may have ended."""

    def __init__(self) -> None:
        self.counts: Counter[Run] = Counter()  # Number of conversations that each process owns.
        self.owners: dict[int, int] = {}  # Sets of processes by that number, 1 and more.
        self._latest: OrderedDict[Conversation, Run] = OrderedDict()

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
            self.owners[before] &= ~run.bit
        if now:
            self.owners[now] = self.owners.get(now, 0) | run.bit
        else:
            del self.counts[run]
        if before and not self.owners[before]:
            del self.owners[before]


# A conversation keeps the hashes of its last turns, and that of its session if it has one.
_TURNS_MAX: Final = 6


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation and its owner."""

    model: str
    run: Run  # The owning process, whose cache holds it.
    scales: Scales = ()  # Of its adapters; another scale makes another conversation.
    # Hashes that identify its next turn, oldest first, at most 6.
    turn_hashes: list[int] = field(default_factory=list)
    is_paused: bool = False  # Whether its request yielded its slot, and goes on later.
    paused_save_s: float = 0.0  # How long it took to save it since its request yielded.
    # Counted in this proxy process; reveals nothing of the text.
    number: int = field(default_factory=count(1).__next__)
    # Why its latest turn was not saved; None if it was, or if nothing could be saved.
    no_file: NoFile | None = None

    def known_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt up to the last of its earlier turns that is known."""
        known = set(self.turn_hashes)
        turns = [at for at, turn in enumerate(prompt.turn_hashes[:-1]) if turn in known]
        return prompt.tokens_until(turns[-1]) if turns else 0


class Conversations:
    """The conversations of all models, with at most `hashes_max` hashes."""

    def __init__(self, hashes_max: int) -> None:
        # The latest conversations of each model.
        self.latest: defaultdict[str, LatestConversations] = defaultdict(LatestConversations)
        self._hashes_max = hashes_max
        self._conversations: OrderedDict[int, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    def get(self, turn_hash: int) -> Conversation | None:
        """Return the conversation of a hash, whether or not its process is replaced."""
        return self._conversations.get(turn_hash)

    def find(self, hashes: Iterable[int], *, is_latest: bool = True) -> Conversation | None:
        """Return the first of these hashes' conversations whose process is its instance's latest.

        Or, unless `is_latest`, the first whose process is not.
        """
        for turn_hash in hashes:
            conversation = self._conversations.get(turn_hash)
            if conversation and conversation.run.is_latest is is_latest:
                return conversation
        return None

    def forget(self, ended: int) -> None:
        for latest in self.latest.values():
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

    def add_earlier_turns(self, conversation: Conversation, turn_hashes: Iterable[int]) -> None:
        """Add hashes of turns that another process has answered."""
        known = conversation.turn_hashes
        earlier = [turn_hash for turn_hash in turn_hashes if turn_hash not in known]
        for turn_hash in earlier[: -1 - _TURNS_MAX + len(known) : -1]:
            if self._conversations.setdefault(turn_hash, conversation) is conversation:
                known.insert(0, turn_hash)

    def remove(self, conversation: Conversation) -> None:
        """Forget a conversation: its next turn begins a new one."""
        for turn_hash in conversation.turn_hashes:
            self._remove_turn(conversation, turn_hash)
        conversation.turn_hashes.clear()

    def _remove_turn(self, conversation: Conversation, turn_hash: int) -> None:
        if self._conversations.get(turn_hash) is conversation:
            del self._conversations[turn_hash]


@dataclass(slots=True, eq=False)
class _Edge:
    blocks: array[int]
    holders: int  # Set of holders that have all of them.
    has_fork: bool = False  # Whether other edges continue from its end.


class PrefixTree:
    """A radix tree of prompts: at most `blocks_max` blocks, in at most `edges_max` edges.

    Blocks that all known prompts pass together are one edge. An edge takes as much memory as 40
    blocks, so a bound on blocks alone would let short prompts take ten times the memory of long
    ones. The state of a recurrent model cannot be cut back, so only the ends of whole prompts count
    for its holders: at most `edges_max` ends.
    """

    def __init__(self, blocks_max: int, edges_max: int) -> None:
        self._blocks_max = blocks_max
        self._edges_max = edges_max
        self._ends: OrderedDict[int, int] = OrderedDict()  # holders by the last block of a prompt
        self._edges: dict[int, _Edge] = {}  # by their first block
        # Least recently used first; an edge comes after the edges that continue from it.
        self._order: OrderedDict[_Edge, None] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size + len(self._ends)

    def levels(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (block count from the start, holders of at least that many).

        The fewest blocks first, and the ends of prompts last.
        """
        at, found = 0, []
        while at < len(blocks) and (edge := self._edges.get(blocks[at])):
            at += shared_blocks(edge.blocks, blocks, at)
            found.append((at, edge.holders))
        if self._ends:
            ends = ((end, self._ends.get(block, 0)) for end, block in enumerate(blocks, 1))
            found += [(end, holders) for end, holders in ends if holders]
        return found

    def add_end(self, blocks: Sequence[int], holder: int, kept: int) -> None:
        """Note that a holder has a whole prompt, and the last `kept` - 1 of the prompts before."""
        before = [block for block in blocks[:-1] if self._ends.get(block, 0) & holder]
        for end in before[: max(0, len(before) - kept + 1)]:
            self._ends[end] &= ~holder
        for end in blocks[-1:]:
            self._ends[end] = self._ends.get(end, 0) | holder
            self._ends.move_to_end(end)
        while len(self._ends) > self._edges_max:
            self._ends.popitem(last=False)

    def add(self, blocks: Sequence[int], holder: int) -> None:
        at, path = 0, []
        while at < len(blocks) and (edge := self._edges.get(blocks[at])):
            shared = shared_blocks(edge.blocks, blocks, at)
            if shared < len(edge.blocks):
                first = _Edge(edge.blocks[:shared], edge.holders, has_fork=True)
                del edge.blocks[:shared]
                self._edges[first.blocks[0]], self._edges[edge.blocks[0]] = first, edge
                self._order[first] = None
                edge = first
            edge.holders |= holder
            path.append(edge)
            at += shared
        if at < len(blocks):
            self._append(path, array("Q", blocks[at:]), holder)
        for edge in reversed(path):
            self._order.move_to_end(edge)
        while self._size > self._blocks_max:
            self._forget_oldest(self._size - self._blocks_max)
        while len(self._order) > self._edges_max:
            self._remove(next(iter(self._order)))

    def remove(self, holders: int) -> None:
        for edge in tuple(self._order):
            edge.holders &= ~holders
            if not edge.holders:  # and so no edge behind it has holders
                self._remove(edge)
        left = ((end, some & ~holders) for end, some in self._ends.items())
        self._ends = OrderedDict((end, some) for end, some in left if some)

    def _append(self, path: list[_Edge], blocks: array[int], holder: int) -> None:
        self._size += len(blocks)
        if path and path[-1].holders == holder and not path[-1].has_fork:
            path[-1].blocks.extend(blocks)
            return
        if path:
            path[-1].has_fork = True
        edge = self._edges[blocks[0]] = _Edge(blocks, holder)
        self._order[edge] = None
        path.append(edge)

    def _forget_oldest(self, excess: int) -> None:
        edge = next(iter(self._order))
        if len(edge.blocks) <= excess:
            self._remove(edge)
        else:
            del edge.blocks[-excess:]
            self._size -= excess

    def _remove(self, edge: _Edge) -> None:
        self._size -= len(edge.blocks)
        del self._edges[edge.blocks[0]], self._order[edge]


# Assumed before the first prompt and restore. Source: SmolLM2-135M on a CPU.
_PREFILL_TPS: Final = 500.0
_BYTE_S: Final = 1e-9
_FEW_TOKENS: Final = 32
# Of the files with equally many tokens of a prompt, at most 16 of conversations and 16 of prefixes
# are compared by size.
_COMPARED_MAX: Final = 16
# Turns of removed files that are remembered, to explain a miss.
_REMOVED_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """The best file to continue a prompt from."""

    file: SlotFile
    tokens: int  # Tokens of the prompt that the file should hold, at least 1.
    blocks: int
    cost_tokens: int  # Tokens that could be computed in the time of reading the file.
    is_whole: bool  # Whether the prompt should begin with the whole file.

    @property
    def is_quick(self) -> bool:
        return self.cost_tokens <= _FEW_TOKENS

    @property
    def worth_tokens(self) -> int:
        """Estimated tokens of the prompt in it, less `cost_tokens`."""
        return self.blocks * BLOCK_TOKENS - self.cost_tokens


class SlotFileIndex:
    """The files of all models; `blocks_max` bounds the index of their prompts."""

    def __init__(self, blocks_max: int) -> None:
        self.added = asyncio.Event()  # Set for a moment when a file is added.
        self._files: dict[str, SlotFile] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._used = 0
        self._without_conversation = 0  # of no conversation
        self._by_turn: dict[tuple[str, int], str] = {}
        self._by_beginning: dict[tuple[str, int], str] = {}  # of those that are used as a whole
        self.prefill_rates: dict[str, float] = {}  # tokens/s by cache key, as the next
        self._byte_s: dict[str, float] = {}  # of the latest restore
        self._read_byte_s = _BYTE_S  # for those without a restore
        self._removed: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._prompts = PrefixTree(blocks_max, blocks_max)

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: SlotFile) -> None:
        self.remove((file.name,))
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        if not file.fingerprint.turn_hashes:
            self._without_conversation |= bit
        self._files[file.name], self._bits[file.name], self._names[bit] = file, bit, file.name
        for turn_hash in _resumable(file):
            self._by_turn[file.cache_key, turn_hash] = file.name
            self._removed.pop((file.cache_key, turn_hash), None)
        if not file.is_recurrent:
            self._prompts.add(file.fingerprint.blocks, bit)
        elif beginning := file.fingerprint.beginning:
            self._by_beginning[file.cache_key, beginning] = file.name
        self.added.set()
        self.added.clear()

    def remove(self, names: Iterable[str]) -> None:
        gone = 0
        for name in names:
            if (file := self._files.pop(name, None)) is None:
                continue
            bit = self._bits.pop(name)
            gone |= bit
            del self._names[bit]
            for turn_hash in _resumable(file):
                if self._by_turn.get((file.cache_key, turn_hash)) == name:
                    del self._by_turn[file.cache_key, turn_hash]
                    self._removed[file.cache_key, turn_hash] = None
            beginning = file.cache_key, file.fingerprint.beginning
            if self._by_beginning.get(beginning) == name:
                del self._by_beginning[beginning]
        while len(self._removed) > _REMOVED_MAX:
            self._removed.popitem(last=False)
        if gone:
            self._prompts.remove(gone)
            self._used &= ~gone
            self._without_conversation &= ~gone

    def set_restore_cost(self, cache_key: str, byte_s: float) -> None:
        """Set how long a restore took, for each byte of its file."""
        self._byte_s[cache_key] = byte_s

    def set_prefill_rate(self, cache_key: str, tps: float) -> None:
        self.prefill_rates[cache_key] = tps

    def set_read_time(self, byte_s: float) -> None:
        """Set how long it takes to read a byte of any file; earlier restores count no more."""
        self._read_byte_s = byte_s
        self._byte_s.clear()

    def find(
        self, cache_key: str, prompt: Prompt, session: int | None = None
    ) -> SavedPrompt | None:
        """Return the file that engines of a cache key can best continue from, if any."""
        if whole := self._find_whole_file(cache_key, prompt, session):
            return whole
        best: SavedPrompt | None = None
        for blocks, holders in reversed(self._prompts.levels(prompt.blocks)):
            if best and blocks * BLOCK_TOKENS <= best.worth_tokens:
                break
            if found := self._smallest(cache_key, holders):
                saved = self._to_saved_prompt(found, prompt, blocks, is_whole=False)
                best = saved if best is None or saved.worth_tokens > best.worth_tokens else best
        return best

    def tokens(self, cache_key: str, turn_hashes: Iterable[int]) -> int:
        names = (self._by_turn.get((cache_key, turn_hash)) for turn_hash in turn_hashes)
        return max((self._files[name].tokens for name in names if name), default=0)

    def why_missing(self, cache_key: str, turn_hashes: Collection[int]) -> NoFile | None:
        """Return why no file of a conversation can be restored; None if unknown."""
        others = {file.cache_key for file in self._files.values()} - {cache_key}
        if any(
            (other, turn_hash) in self._by_turn for other in others for turn_hash in turn_hashes
        ):
            return NoFile.OTHER_BUILD
        is_removed = any((cache_key, turn_hash) in self._removed for turn_hash in turn_hashes)
        return NoFile.DELETED if is_removed else None

    def _find_whole_file(
        self, cache_key: str, prompt: Prompt, session: int | None
    ) -> SavedPrompt | None:
        """Return a file whose whole content is a prefix of the prompt.

        It is the newest of this conversation, or that of its beginning.
        """
        for name in self._whole_files(cache_key, prompt, session):
            file = self._files[name]
            if continues(prompt.blocks, file.fingerprint.blocks):
                blocks = len(file.fingerprint.blocks) or file.tokens // BLOCK_TOKENS
                return self._to_saved_prompt(
                    file, prompt, min(blocks, len(prompt.blocks)), is_whole=True
                )
        return None

    def _whole_files(self, cache_key: str, prompt: Prompt, session: int | None) -> Iterator[str]:
        for turn_hash in (*reversed(prompt.turn_hashes), *(() if session is None else (session,))):
            if name := self._by_turn.get((cache_key, turn_hash)):
                yield name
        for beginning in prompt.shared_hashes if self._by_beginning else ():
            if name := self._by_beginning.get((cache_key, beginning)):
                yield name

    def _to_saved_prompt(
        self, file: SlotFile, prompt: Prompt, blocks: int, *, is_whole: bool
    ) -> SavedPrompt:
        tokens = min(file.tokens, prompt.tokens if is_whole else blocks * BLOCK_TOKENS)
        cost = self.cost_tokens(file.cache_key, file.size_bytes)
        return SavedPrompt(file, tokens, blocks, cost, is_whole)

    def cost_tokens(self, cache_key: str, size_bytes: int, transfer_s: float = 0.0) -> int:
        """Return the tokens that could be computed in the time of getting and reading a file."""
        read_s = self._byte_s.get(cache_key, self._read_byte_s) * size_bytes
        return round((transfer_s + read_s) * self.prefill_rates.get(cache_key, _PREFILL_TPS))

    def _smallest(self, cache_key: str, holders: int) -> SlotFile | None:
        of_none = _bits(holders & self._without_conversation, _COMPARED_MAX)
        of_conversations = _bits(holders & ~self._without_conversation, _COMPARED_MAX)
        found = (self._files[self._names[bit]] for bit in (*of_none, *of_conversations))
        fitting = (file for file in found if file.cache_key == cache_key)
        return min(fitting, key=lambda file: file.size_bytes, default=None)


def _resumable(file: SlotFile) -> Sequence[int]:
    """Return the turns that a file can be continued from; a recurrent state cannot be cut back."""
    turn_hashes = file.fingerprint.turn_hashes
    return turn_hashes[-1:] if file.is_recurrent else turn_hashes


def _bits(holders: int, most: int) -> Iterable[int]:
    while holders and most:
        yield holders & -holders
        holders &= holders - 1
        most -= 1


_HOLDERS_MAX: Final = 16


class RemotePrefixes:
    """At most `hashes_max` turn hashes, each with the instances that hold it."""

    def __init__(self, hashes_max: int) -> None:
        self._hashes_max = hashes_max
        # Expiry time by instance; both dictionaries have the latest last.
        self.holders: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._held: defaultdict[str, set[int]] = defaultdict(set)  # The same, by instance.

    def add(self, instance: str, turn_hashes: Iterable[int], now_s: float) -> None:
        """Note turn hashes that an instance reports, oldest first."""
        for turn_hash in turn_hashes:
            holders = self.holders.setdefault(turn_hash, {})
            holders.pop(instance, None)
            holders[instance] = now_s + EXPIRES_S
            self._held[instance].add(turn_hash)
            if len(holders) > _HOLDERS_MAX:
                oldest = next(iter(holders))
                del holders[oldest]
                self._held[oldest].discard(turn_hash)
            self.holders.move_to_end(turn_hash)
        while len(self.holders) > self._hashes_max:
            turn_hash, holders = self.holders.popitem(last=False)
            for holder in holders:
                self._held[holder].discard(turn_hash)

    def forget(self, instance: str) -> None:
        for turn_hash in self._held.pop(instance, ()):
            holders = self.holders[turn_hash]
            del holders[instance]
            if not holders:
                del self.holders[turn_hash]

    def find(self, prompt: Prompt, now_s: float) -> tuple[Mapping[str, int], str | None, int]:
        """Return the beliefs about a prompt; the instances may serve other models.

        They are the tokens that each instance holds, the owner (the instance that has most of the
        conversation, or None), and the index of the owner's latest turn in the turn hashes.
        """
        if not self.holders:
            return {}, None, 0
        turns: dict[str, int] = {}
        owner, owners_turn, told = None, 0, tuple(map(prompt.shared_turn_hash, prompt.turn_hashes))
        for turn in reversed(range(len(prompt.turn_hashes))):
            holders = self.holders.get(told[turn])
            for instance, expires_at_s in reversed(holders.items()) if holders else ():
                if instance not in turns and expires_at_s > now_s:
                    turns[instance] = turn
                    if owner is None and turn >= prompt.first_own:
                        owner, owners_turn = instance, turn
        tokens = {turn: prompt.tokens_until(turn) for turn in set(turns.values())}
        return {instance: tokens[turn] for instance, turn in turns.items()}, owner, owners_turn
