"""A radix tree of prompt prefixes, and the ends of whole prompts, each with its holders. Pure.

A prompt is a sequence of hashes, each of which includes all before it (`proxy.cache.prompt`), so a
block stands for the whole prompt up to its end. Blocks that all known prompts pass together are one
edge. The state of a recurrent model cannot be cut back, so only the ends of whole prompts count
there (`PromptEnds`), and only those of a conversation's latest prompts.

Bounded: the least recently used blocks and ends go first, and the end of a prompt before its
beginning. Holders are bits of a number, so that a thousand of them are compared at once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Edge:
    """Consecutive blocks.

    Attributes:
        holders: Set of holders that have all of them.
        has_fork: Whether other edges continue from its end.
    """

    blocks: array[int]
    holders: int
    has_fork: bool = False


class PrefixTree:
    """At most `blocks_max` blocks, in at most `edges_max` edges.

    An edge takes as much memory as 40 blocks, so a bound on blocks alone would let short prompts
    take ten times the memory of long ones.
    """

    def __init__(self, blocks_max: int, edges_max: int) -> None:
        self._blocks_max = blocks_max
        self._edges_max = edges_max
        self._edges: dict[int, _Edge] = {}  # by their first block
        # Least recently used first; an edge comes after the edges that continue from it.
        self._order: OrderedDict[_Edge, None] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def levels(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (block count from the start, holders of at least that many), the fewest first."""
        at, found = 0, []
        while at < len(blocks) and (edge := self._edges.get(blocks[at])):
            at += _count_shared_blocks(edge.blocks, blocks, at)
            found.append((at, edge.holders))
        return found

    def add(self, blocks: Sequence[int], holder: int) -> None:
        at, path = 0, []
        while at < len(blocks) and (edge := self._edges.get(blocks[at])):
            shared = _count_shared_blocks(edge.blocks, blocks, at)
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


def _count_shared_blocks(edge: Sequence[int], blocks: Sequence[int], at: int) -> int:
    """Return how many blocks of an edge a prompt shares, if it shares the first one at `at`."""
    most = min(len(edge), len(blocks) - at)
    if edge[most - 1] == blocks[at + most - 1]:  # and so all before it
        return most
    return bisect_left(range(most), 1, key=lambda place: edge[place] != blocks[at + place])


class PromptEnds:
    """At most `ends_max` ends of prompts; holders are bits of a number."""

    def __init__(self, ends_max: int) -> None:
        self._ends_max = ends_max
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def levels(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (block count from the start, holders of a prompt that ends there)."""
        if not self._holders:
            return []
        found = ((at, self._holders.get(block, 0)) for at, block in enumerate(blocks, 1))
        return [(at, holders) for at, holders in found if holders]

    def add(self, blocks: Sequence[int], holder: int, kept: int) -> None:
        """Note that a holder has a prompt, and the last `kept` - 1 of the prompts before it."""
        before = [block for block in blocks[:-1] if self._holders.get(block, 0) & holder]
        for end in before[: max(0, len(before) - kept + 1)]:
            self._holders[end] &= ~holder
        for end in blocks[-1:]:
            self._holders[end] = self._holders.get(end, 0) | holder
            self._holders.move_to_end(end)
        while len(self._holders) > self._ends_max:
            self._holders.popitem(last=False)

    def remove(self, holders: int) -> None:
        """Remove holders from all ends."""
        for end, of_end in tuple(self._holders.items()):
            if left := of_end & ~holders:
                self._holders[end] = left
            else:
                del self._holders[end]
