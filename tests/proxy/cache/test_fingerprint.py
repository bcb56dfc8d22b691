"""The fingerprint of a conversation, written as a word and read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.fingerprint import (
    ConversationFingerprint,
    Scales,
    decode_fingerprint,
    lora_of,
    scales_of,
)

numbers = st.lists(st.integers(0, 2**64 - 1), max_size=6).map(tuple)


scales = st.lists(st.floats(-100, 100), max_size=3).map(tuple)


@given(numbers, numbers, scales)
def test_a_word_is_read_as_it_was_written(
    marks: tuple[int, ...], blocks: tuple[int, ...], scales: Scales
) -> None:
    fingerprint = ConversationFingerprint(marks, blocks, scales if marks or blocks else ())
    assert decode_fingerprint(fingerprint.to_ascii()) == fingerprint


@given(st.integers(1, 2**64 - 1), numbers, scales)
def test_a_word_of_a_beginning_is_read_as_it_was_written(
    beginning: int, blocks: tuple[int, ...], scales: Scales
) -> None:
    fingerprint = ConversationFingerprint((), blocks, scales, beginning)
    assert decode_fingerprint(fingerprint.to_ascii()) == fingerprint


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ([{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.0}], (0.5, 0.0)),
        ([{"id": 1, "scale": 0.5}, {"id": 0, "scale": 0.0}], ()),
        ([{"id": 0, "scale": "0.5"}], ()),
        ([{"scale": 0.5}], ()),
        ([0], ()),
        ([], ()),
        ("all", ()),
        (None, ()),
    ],
)
def test_scales_are_those_of_every_adapter_in_order(lora: object, expected: Scales) -> None:
    assert scales_of(lora) == expected
    assert not expected or lora_of(expected) == lora


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
        "2 b ",
        "2 one AAAAAAAAAAA=",
        "2 1 AAAAAAAAAA",
        "2 1 AAAAAAAA",
        "2 1 \u00e4AAAAAAAAAA=",
        "2 1 AAAAAAAAAAA= more",
        "2 1 AAAAAAAAAAA= 1.0 2.0",
    ],
)
def test_what_is_no_word_of_ours_tells_nothing(word: str) -> None:
    assert decode_fingerprint(word) == ConversationFingerprint()
