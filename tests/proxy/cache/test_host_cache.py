"""The expected content of an engine's host cache, as measured on build 10434."""

from __future__ import annotations

from typing import Any, cast

import pytest

from proxy.cache.host_cache import EMPTY, HostCache, SlotContent


def slot(
    conversation: object | None = None, tokens: int = 0, blocks: tuple[int, ...] = ()
) -> SlotContent:
    return SlotContent(cast("Any", conversation), tokens, blocks)


A, B, C, D = (slot(name, 100, tuple(range(at, at + 6))) for at, name in enumerate("abcd", start=10))


def cache(tokens: int = 250) -> HostCache:
    return HostCache(tokens, 1)


def test_the_oldest_copies_go_for_a_new_one() -> None:
    host_cache = cache()
    host_cache.note_copies([A, B, EMPTY])
    host_cache.note_copies([A, B])  # both are there already
    host_cache.note_copies([C])
    assert [host_cache.holds(name) for name in "abc"] == [0, 100, 100]
    assert (host_cache.conversations, host_cache.used_bytes) == (2, 200)


def test_copies_are_bounded_by_their_number_too() -> None:
    host_cache = cache(tokens=10**9)
    for number in range(1100):
        host_cache.note_copies([slot(number, 4, (number,))])
    assert host_cache.conversations == 1024
    assert not host_cache.holds(75)
    assert host_cache.holds(76)


def test_what_exceeds_the_limit_is_not_copied_and_removes_nothing() -> None:
    host_cache = cache()
    host_cache.note_copies([A, slot("b", 300)])
    assert host_cache.copied_tokens == [100]
    assert host_cache.absence_probability(300) == 1


def test_a_later_turn_replaces_its_copy_but_an_edit_does_not() -> None:
    host_cache = cache(500)
    host_cache.note_copies([A, B])
    host_cache.note_copies([slot("a", 120, (*A.blocks, 1)), slot("b", 80, (*B.blocks[:3], 7))])
    assert host_cache.copied_tokens == [100, 120, 80]
    assert host_cache.holds("b") == 80


def test_a_turn_that_drops_its_reasoning_leaves_the_copy_before() -> None:
    host_cache = cache(500)
    host_cache.note_copies([A])
    host_cache.note_found("a", 60)
    host_cache.note_copies([slot("a", 120, (*A.blocks, 1))])
    assert host_cache.copied_tokens == [100, 120]


def test_a_task_without_a_named_slot_saves_that_slot_and_takes_its_copy() -> None:
    host_cache = cache(500)
    host_cache.note_copies([A, B])
    host_cache.note_slot_taken(C, "a", (*A.blocks, 1))
    assert [host_cache.holds(name) for name in "abc"] == [0, 100, 100]


def test_a_slot_that_holds_the_conversation_needs_no_copy() -> None:
    host_cache = cache(500)
    host_cache.note_copies([A])
    host_cache.note_slot_taken(A, "a", (*A.blocks, 1))
    assert host_cache.holds("a") == 100


@pytest.mark.parametrize(("shared", "held"), [(4, 0), (1, 100)])
def test_a_new_conversation_takes_a_copy_that_begins_as_it_does(shared: int, held: int) -> None:
    host_cache = cache(500)
    host_cache.note_copies([A])
    host_cache.note_slot_taken(EMPTY, "new", (*A.blocks[:shared], 1, 2))
    assert host_cache.holds("a") == held


def test_the_response_tells_whether_a_copy_was_taken() -> None:
    host_cache = cache(500)
    host_cache.note_copies([A, slot("b", 90)])
    host_cache.note_slot_taken(EMPTY, "new", (*A.blocks[:4], 1))
    host_cache.note_copies([A])  # it is in a slot too
    assert host_cache.copied_tokens == [90, 100]
    host_cache.note_found("new", 0)
    assert host_cache.copied_tokens == [100, 90]
    host_cache.note_slot_taken(EMPTY, "other", (*A.blocks[:1], 1))
    host_cache.note_found("other", 26)
    assert host_cache.holds("a") == 0


def test_absence_is_expected_by_room_and_then_by_earlier_returns() -> None:
    host_cache = cache(1000)
    assert host_cache.absence_probability(100) == 0
    host_cache.note_copies([slot(number, 100) for number in range(30)])
    expected = host_cache.absence_probability(100)
    assert 0.7 < expected < 0.8
    for number in range(20, 30):
        host_cache.note_return(number)
    assert host_cache.absence_probability(100) < expected / 2


def test_a_wrong_model_is_not_believed_until_it_is_tried_again() -> None:
    host_cache = cache(500)
    for _ in range(4):
        host_cache.note_copies([A])
        host_cache.note_slot_taken(EMPTY, "a", (*A.blocks, 1))
        host_cache.note_found("a", 0)
    assert not host_cache.is_trusted
    host_cache.note_copies([A])
    for _ in range(20):
        host_cache.note_return("a")
    assert host_cache.is_trusted
