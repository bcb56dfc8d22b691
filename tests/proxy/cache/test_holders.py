"""The tree of prompts compared with a plain list of blocks, each with its holders."""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.holders import PrefixTree

HOLDERS = (1, 2, 4)


class Blocks:
    """Each block by itself, the least recently used first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.holders: OrderedDict[int, int] = OrderedDict()

    def add(self, blocks: list[int], holder: int) -> None:
        for block in reversed(blocks):
            self.holders[block] = self.holders.get(block, 0) | holder
            self.holders.move_to_end(block)
        while len(self.holders) > self.most:
            self.holders.popitem(last=False)

    def remove(self, holders: int) -> None:
        left = {block: of_block & ~holders for block, of_block in self.holders.items()}
        self.holders = OrderedDict((block, held) for block, held in left.items() if held)

    def held(self, blocks: list[int], holder: int) -> int:
        has = [bool(self.holders.get(block, 0) & holder) for block in blocks]
        return has.index(False) if False in has else len(has)


def hashes(letters: str) -> list[int]:
    """Return hashes of which each includes all before it."""
    return [int.from_bytes(letter.encode(), "big") for letter in accumulate(letters)]


def held(tree: PrefixTree, blocks: list[int], holder: int) -> int:
    return max((count for count, some in tree.levels(blocks) if some & holder), default=0)


prompts = st.text("ab", min_size=1, max_size=7).map(hashes)
steps = st.lists(st.tuples(prompts, st.sampled_from(HOLDERS), st.integers(0, 9)), max_size=40)


@given(steps, st.integers(1, 25))
def test_it_holds_the_same_as_a_list_of_blocks(
    schedule: list[tuple[list[int], int, int]], most: int
) -> None:
    tree, plain = PrefixTree(most, most), Blocks(most)
    for blocks, holder, chance in schedule:
        for case in (tree, plain):
            if chance:
                case.add(blocks, holder)
            else:
                case.remove(holder)
        assert len(tree) == len(plain.holders)
        for asked, _, _ in schedule:
            for one_holder in HOLDERS:
                assert held(tree, asked, one_holder) == plain.held(asked, one_holder)


def test_a_conversation_that_goes_on_is_one_edge() -> None:
    tree = PrefixTree(1000, 1000)
    for length in range(1, 8):
        tree.add(hashes("a" * length), 1)
    assert len(tree.levels(hashes("aaaaaaa"))) == 1


def test_those_that_hold_more_are_among_those_that_hold_less() -> None:
    tree = PrefixTree(1000, 1000)
    tree.add(hashes("aaab"), 1)
    tree.add(hashes("aaac"), 2)
    tree.add(hashes("aa"), 4)
    assert tree.levels(hashes("aaabbb")) == [(2, 7), (3, 3), (4, 1)]


def test_the_edges_are_bounded_as_well_and_the_least_recently_used_go_first() -> None:
    tree = PrefixTree(1000, 3)
    for first in (10, 20, 30, 40):
        tree.add([first, first + 1], 1)
    assert [len(tree.levels([first])) for first in (10, 20, 30, 40)] == [0, 1, 1, 1]
    tree.add([20, 22], 1)  # splits an edge
    assert [tree.levels([20, last]) for last in (21, 22)] == [[(1, 1)], [(1, 1), (2, 1)]]
    assert len(tree) == 4
