"""What a conversation is known by, as a word and read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.home.chain import Chain, read_chain

numbers = st.lists(st.integers(0, 2**64 - 1), max_size=6).map(tuple)


@given(numbers, numbers)
def test_a_word_is_read_as_it_was_written(marks: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert read_chain(Chain(marks, blocks).word) == Chain(marks, blocks)


def test_nothing_known_is_no_word() -> None:
    assert Chain().word == ""
    assert read_chain("") == Chain()


def test_the_longest_prompt_makes_a_word_that_is_kept() -> None:
    assert len(Chain(tuple(range(6)), tuple(range(8192))).word) < 128 * 1024


@pytest.mark.parametrize(
    "word",
    [
        "1 1",
        "2 1 AAAAAAAAAAA=",
        "1 2 AAAAAAAAAAA=",
        "1 -1 AAAAAAAAAAA=",
        "1 one AAAAAAAAAAA=",
        "1 1 AAAAAAAAAA",
        "1 1 AAAAAAAA",
        "1 1 \u00e4AAAAAAAAAA=",
        "1 1 AAAAAAAAAAA= more",
    ],
)
def test_what_is_no_word_of_ours_tells_nothing(word: str) -> None:
    assert read_chain(word) == Chain()
