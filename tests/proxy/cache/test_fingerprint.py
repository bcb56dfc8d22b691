"""What a conversation is known by, as a word and read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.fingerprint import ConversationFingerprint, decode_fingerprint

numbers = st.lists(st.integers(0, 2**64 - 1), max_size=6).map(tuple)


@given(numbers, numbers)
def test_a_word_is_read_as_it_was_written(marks: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert decode_fingerprint(
        ConversationFingerprint(marks, blocks).to_ascii()
    ) == ConversationFingerprint(marks, blocks)


def test_nothing_known_is_no_word() -> None:
    assert ConversationFingerprint().to_ascii() == ""
    assert decode_fingerprint("") == ConversationFingerprint()


def test_the_longest_prompt_makes_a_word_that_is_kept() -> None:
    assert len(ConversationFingerprint(tuple(range(6)), tuple(range(8192))).to_ascii()) < 128 * 1024


@pytest.mark.parametrize(
    "word",
    [
        "2 1",
        "1 1 AAAAAAAAAAA=",
        "2 2 AAAAAAAAAAA=",
        "2 -1 AAAAAAAAAAA=",
        "2 one AAAAAAAAAAA=",
        "2 1 AAAAAAAAAA",
        "2 1 AAAAAAAA",
        "2 1 \u00e4AAAAAAAAAA=",
        "2 1 AAAAAAAAAAA= more",
    ],
)
def test_what_is_no_word_of_ours_tells_nothing(word: str) -> None:
    assert decode_fingerprint(word) == ConversationFingerprint()
