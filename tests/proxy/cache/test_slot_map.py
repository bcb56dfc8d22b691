"""Which slot a turn is sent to, and how the engine's own page puts a wrong belief right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.cache.holders import Conversation, Run
from proxy.cache.host_cache import EMPTY, HostCache, SlotContent
from proxy.cache.prompt import Prompt, read_prompt
from proxy.cache.slot_map import CONFIRMED, GUESSED, SEEN, Slot, SlotMap, match_slots
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState

NOW_S = 100.0
LATER_S = 200.0


@cache
def chat(name: str) -> Conversation:
    return Conversation("chat", Run("chat.1", (), 1))


def conversation_in(
    slot_map: SlotMap, conversation: str, tokens: int, *, now_s: float = NOW_S
) -> Slot:
    """Have a conversation's turn asked and answered."""
    (tracked,) = conversations_in(slot_map, [conversation], tokens, now_s=now_s)
    return tracked


def conversations_in(
    slot_map: SlotMap, conversations: Sequence[str], tokens: int, *, now_s: float = NOW_S
) -> list[Slot]:
    """Have turns of several conversations asked at once and answered."""
    used: list[Slot] = []
    for conversation in conversations:
        tracked = slot_map.reserve(conversation, chat(conversation), now_s)
        assert tracked
        is_guess = tracked.conversation is not None and not tracked.is_confirmed
        if is_guess:
            slot_map.mark_used(tracked)
        else:
            slot_map.mark_sent(tracked, is_named=tracked.conversation is not None)
        used.append(tracked)
    for conversation, tracked in zip(conversations, used, strict=True):
        slot_map.release(conversation, now_s)
        slot_map.set_conversation(tracked, chat(conversation), tokens)
    return used


def seen(slot: int, task: int, tokens: int, *, is_busy: bool = False) -> SlotState:
    return SlotState(slot, task, tokens, is_busy)


def test_an_engine_is_taken_to_begin_with_its_last_slot() -> None:
    slot_map = SlotMap(4)
    assert [conversation_in(slot_map, conversation, 10).id_slot for conversation in "abcd"] == [
        3,
        2,
        1,
        0,
    ]


def test_then_it_takes_the_slot_used_longest_ago() -> None:
    slot_map = SlotMap(2)
    assert [conversation_in(slot_map, conversation, 10).id_slot for conversation in "abcd"] == [
        1,
        0,
        1,
        0,
    ]


def test_a_turn_goes_back_to_the_slot_of_its_conversation() -> None:
    slot_map = SlotMap(4)
    first, _ = conversation_in(slot_map, "a", 10), conversation_in(slot_map, "b", 10)
    assert slot_map.reserve(object(), chat("a"), NOW_S) is first


def test_a_slot_in_use_is_given_to_no_other_request() -> None:
    slot_map = SlotMap(2)
    held = conversation_in(slot_map, "a", 10)
    assert not slot_map.is_in_use(chat("a"))
    assert slot_map.reserve("one", chat("a"), NOW_S) is held
    assert slot_map.is_in_use(chat("a"))
    assert slot_map.reserve("another", chat("a"), NOW_S) is not held
    assert slot_map.reserve("a third", chat("a"), NOW_S) is None


def test_one_whose_slot_was_taken_meanwhile_holds_nothing_there() -> None:
    slot_map = SlotMap(1)
    conversation_in(slot_map, "a", 10)
    conversation_in(slot_map, "b", 10)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    assert tracked.conversation is None


def test_a_guess_is_not_sure_until_the_engine_says_so() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    assert not tracked.is_confirmed
    slot_map.sync([seen(0, -1, 0), seen(1, 7, 9)], tracked, NOW_S)
    assert (tracked.id_slot, tracked.is_confirmed) == (1, True)


def test_what_is_sure_stays_so_over_the_next_turns() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    tracked = slot_map.reserve("turn", chat("a"), NOW_S)
    assert tracked
    slot_map.sync([seen(0, -1, 0), seen(1, 7, 9)], tracked, NOW_S)
    slot_map.mark_sent(tracked, is_named=True)
    slot_map.release("turn", NOW_S)
    slot_map.set_conversation(tracked, chat("a"), 20)
    assert slot_map.reserve("next", chat("a"), NOW_S) is tracked
    assert tracked.is_confirmed


def test_after_a_pause_nothing_is_sure() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    tracked = slot_map.reserve("turn", chat("a"), NOW_S)
    assert tracked
    slot_map.sync([seen(1, 7, 9)], tracked, NOW_S)
    slot_map.release("turn", NOW_S)
    slot_map.set_conversation(tracked, chat("a"), 20)
    assert slot_map.reserve("next", chat("a"), LATER_S) is tracked
    assert not tracked.is_confirmed


def test_an_unreported_warm_up_moves_all_by_one() -> None:
    slot_map = SlotMap(3)
    conversation_in(slot_map, "a", 10)
    conversation_in(slot_map, "b", 30)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    slot_map.sync([seen(2, 0, 1), seen(1, 5, 9), seen(0, 9, 29)], tracked, NOW_S)
    assert (tracked.id_slot, tracked.is_confirmed) == (1, True)


def test_equal_lengths_are_told_apart_by_the_order_of_asking() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    conversation_in(slot_map, "b", 10)
    tracked = slot_map.reserve(object(), chat("b"), NOW_S)
    assert tracked
    slot_map.sync([seen(0, 3, 9), seen(1, 8, 9)], tracked, NOW_S)
    assert tracked.id_slot == 1


def test_a_probe_in_its_slot_ends_a_conversation_there() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    conversation_in(slot_map, "b", 30)
    tracked = slot_map.reserve(object(), chat("a"), LATER_S)
    assert tracked
    slot_map.sync([seen(1, 99, 1), seen(0, 8, 29)], tracked, LATER_S)
    assert not tracked.is_confirmed
    changed = slot_map.rebind(tracked, chat("a"), LATER_S)
    assert changed
    assert changed.conversation is None
    kept = slot_map.reserve(object(), chat("b"), LATER_S)
    assert kept
    assert (kept.id_slot, kept.is_confirmed) == (0, True)


def test_slots_in_use_belong_to_those_who_use_them() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    running = slot_map.reserve("runs", chat("b"), NOW_S)
    assert running
    slot_map.mark_sent(running, is_named=False)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    slot_map.sync([seen(0, 3, 9), seen(1, 8, 4, is_busy=True)], tracked, NOW_S)
    assert (tracked.id_slot, running.id_slot) == (0, 1)


def test_an_engine_that_says_nothing_leaves_nothing_sure() -> None:
    slot_map = SlotMap(2)
    conversation_in(slot_map, "a", 10)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    slot_map.sync([], tracked, NOW_S)
    assert not tracked.is_confirmed


def test_slots_used_at_once_are_found_in_any_order() -> None:
    slot_map = SlotMap(4)
    for conversation, tokens in (("a", 10), ("b", 30), ("c", 50)):
        conversation_in(slot_map, conversation, tokens)
    tracked = slot_map.reserve("turn", chat("c"), NOW_S)
    assert tracked
    assert [slot.id_slot for slot in slot_map.mark_refreshed(tracked)] == [0, 2, 3]
    slot_map.mark_sent(tracked, is_named=True)
    slot_map.release("turn", NOW_S)
    slot_map.set_conversation(tracked, chat("c"), 60)
    page = [seen(1, 10, 59), seen(3, 7, 9), seen(2, 9, 29), seen(0, 8, 0)]
    for conversation, slot in (("a", 3), ("b", 2), ("c", 1)):
        tracked = slot_map.reserve(conversation, chat(conversation), LATER_S)
        assert tracked
        slot_map.sync(page, tracked, LATER_S)
        assert (tracked.conversation, tracked.id_slot) == (chat(conversation), slot)
        assert tracked.is_confirmed


def test_slots_in_use_are_not_passed_by() -> None:
    slot_map = SlotMap(3)
    conversation_in(slot_map, "a", 10)
    runs = slot_map.reserve("runs", chat("b"), NOW_S)
    assert runs
    slot_map.mark_sent(runs, is_named=True)
    tracked = slot_map.reserve(object(), chat("a"), NOW_S)
    assert tracked
    assert [slot.id_slot for slot in slot_map.mark_refreshed(tracked)] == [0]


def test_what_came_after_the_last_task_began_is_not_put_aside_yet() -> None:
    slot_map = SlotMap(3)
    first = conversation_in(slot_map, "a", 10)
    new = slot_map.reserve("new", None, NOW_S)
    assert new
    assert slot_map.has_unsaved(new)
    assert not slot_map.has_unsaved(first)
    slot_map.mark_sent(new, is_named=True)
    assert not slot_map.has_unsaved(new)


def test_who_is_led_gets_the_oldest_slot_whose_number_is_sure() -> None:
    slot_map = SlotMap(3)
    conversation_in(slot_map, "a", 10)
    new = slot_map.reserve("new", None, NOW_S)
    assert new
    assert slot_map.reserve_lru(new) is new  # none is sure
    # Somebody else was in slot 2, of which we thought that it was never used.
    slot_map.sync([seen(0, -1, 0), seen(1, 7, 9), seen(2, 3, 5)], new, NOW_S)
    led = slot_map.reserve_lru(new)
    assert (led.id_slot, led.is_confirmed, led.holder, led.conversation) == (0, True, "new", None)
    assert new.holder is None
    assert [slot.id_slot for slot in slot_map.mark_refreshed(led)] == [2, 1]
    assert not slot_map.has_unsaved(led)


# Slots that were filled from a disk.


def prompt(text: str) -> Prompt:
    read = read_prompt(EndpointKind.COMPLETION, "chat", {"prompt": text})
    assert read
    return read


STORY = prompt("a story " * 40)
LONGER = prompt("a story " * 80)


def filled(slot: int, task: int, tokens: int = 300) -> RestoredSlot:
    return RestoredSlot(slot, task, tokens, ConversationFingerprint((1,), STORY.blocks))


def test_a_slot_that_was_filled_is_sure_once_the_engine_was_looked_at() -> None:
    slot_map = SlotMap(2)
    slot_map.add_restored(filled(0, -1), chat("a"))
    tracked = slot_map.reserve("turn", chat("a"), NOW_S)
    assert tracked
    assert (tracked.id_slot, tracked.is_confirmed) == (0, False)
    slot_map.sync([seen(0, -1, 0), seen(1, 0, 7)], tracked, NOW_S)
    assert tracked.is_confirmed
    assert tracked.verifies_restore(LONGER)


def test_each_that_was_filled_is_looked_at_by_the_request_that_asks_for_it() -> None:
    """Who uses an idle engine for something else may have been there since the last look."""
    slot_map = SlotMap(2)
    slot_map.add_restored(filled(0, 3), chat("a"))
    slot_map.add_restored(filled(1, 5), chat("b"))
    first = slot_map.reserve("turn", chat("a"), NOW_S)
    assert first
    slot_map.sync([seen(0, 3, 300), seen(1, 5, 300)], first, NOW_S)
    second = slot_map.reserve("another", chat("b"), NOW_S)
    assert second
    assert not second.is_confirmed
    slot_map.sync([seen(0, 8, 300, is_busy=True), seen(1, 9, 300)], second, NOW_S)
    assert not second.is_confirmed
    assert second.conversation is None


def test_a_new_conversation_gets_the_slot_that_the_engine_would_take() -> None:
    slot_map = SlotMap(3)
    slot_map.add_restored(filled(0, 3), chat("a"))
    slot_map.add_restored(filled(2, 5), chat("b"))
    tracked = slot_map.reserve("turn", chat("c"), NOW_S)
    assert tracked
    assert tracked.id_slot == 1
    tracked = slot_map.reserve("another", chat("d"), NOW_S)
    assert tracked
    assert tracked.id_slot == 0


def test_only_the_first_that_goes_on_from_there_proves_anything() -> None:
    slot_map = SlotMap(1)
    slot_map.add_restored(filled(0, 3), chat("a"))
    tracked = slot_map.reserve("turn", chat("a"), NOW_S)
    assert tracked
    assert not tracked.verifies_restore(LONGER)  # the engine was not looked at
    slot_map.sync([seen(0, 3, 300)], tracked, NOW_S)
    assert tracked.verifies_restore(LONGER)
    assert tracked.verifies_restore(STORY)
    assert not tracked.verifies_restore(prompt("another " * 80))
    assert not tracked.verifies_restore(prompt("a story " * 20))
    assert not tracked.verifies_restore(None)
    slot_map.mark_sent(tracked, is_named=True)
    assert not tracked.verifies_restore(LONGER)


def test_unknown_slots_prove_nothing() -> None:
    slot_map = SlotMap(1)
    slot_map.add_restored(RestoredSlot(0, 3, 300), None)
    tracked = slot_map.reserve("turn", chat("a"), NOW_S)
    assert tracked
    slot_map.sync([seen(0, 3, 300)], tracked, NOW_S)
    assert not tracked.verifies_restore(LONGER)


def test_idle_slots_that_are_known_are_told() -> None:
    slot_map = SlotMap(3)
    conversation_in(slot_map, "a", 10)
    conversation_in(slot_map, "b", 30)
    running = slot_map.reserve("runs", chat("c"), NOW_S)
    assert running
    slot_map.mark_sent(running, is_named=True)
    page = [seen(2, 4, 9), seen(1, 6, 30), seen(0, 9, 5, is_busy=True)]
    assert {
        slot: tracked.conversation
        for slot, tracked in slot_map.idle_conversations(page, NOW_S).items()
    } == {1: chat("b"), 2: chat("a")}


def test_requests_that_begin_in_another_order_than_they_were_sent_keep_their_slots() -> None:
    slot_map = SlotMap(2)
    first, second = (conversation_in(slot_map, name, 10) for name in "ab")
    slot_map.sync([seen(1, 1, 10), seen(0, 2, 10)], None, NOW_S)
    conversations_in(slot_map, "ab", 20)
    slot_map.sync([seen(1, 4, 20), seen(0, 3, 20)], None, NOW_S)
    slot_map.reserve(object(), None, LATER_S)
    slot_map.sync([seen(1, 4, 20), seen(0, 3, 20)], None, LATER_S)
    assert (first.id_slot, second.id_slot) == (1, 0)


def test_a_request_in_another_slot_than_expected_is_found_where_both_hold_as_many_tokens() -> None:
    slot_map = SlotMap(3)
    first, second, third = (conversation_in(slot_map, name, 20) for name in "abc")
    slot_map.sync([seen(2, 1, 20), seen(1, 2, 20), seen(0, 3, 20)], None, NOW_S)
    conversations_in(slot_map, "abc", 20)  # the engine ends that of b first
    latest = conversation_in(slot_map, "d", 20)
    assert latest is first  # which it was expected to replace
    page = [seen(2, 4, 20), seen(1, 7, 20), seen(0, 6, 20)]
    found = {
        slot: idle_conversation.conversation
        for slot, idle_conversation in slot_map.idle_conversations(page, NOW_S).items()
    }
    assert found == {1: chat("d"), 0: chat("c")}
    assert (latest.id_slot, second.conversation, third.id_slot) == (1, None, 0)


def test_a_known_slot_that_others_used_is_not_the_one_any_more() -> None:
    slot_map = SlotMap(2)
    first, second = (conversation_in(slot_map, name, 10) for name in "ab")
    slot_map.sync([seen(1, 1, 10), seen(0, 2, 10)], None, NOW_S)
    slot_map.sync([seen(1, 9, 7), seen(0, 2, 10)], None, NOW_S)
    assert (first.conversation, second.conversation) == (None, chat("b"))


def test_the_number_of_an_only_slot_is_known_after_an_unreported_warm_up() -> None:
    slot_map = SlotMap(1)
    slot_map.sync([seen(0, 0, 7)], None, NOW_S)
    (tracked,) = slot_map.idle
    assert tracked.is_confirmed
    assert tracked.conversation is None
    slot_map.sync([seen(0, 5, 90, is_busy=True)], None, NOW_S)
    assert not tracked.is_confirmed


def test_the_number_of_a_slot_that_was_never_used_is_known() -> None:
    slot_map = SlotMap(2)
    first = slot_map.reserve(object(), chat("a"), NOW_S)
    assert first
    assert first.is_confirmed
    slot_map.mark_sent(first, is_named=True)
    second = slot_map.reserve(object(), chat("b"), LATER_S)
    assert second
    assert (first.is_confirmed, second.is_confirmed) == (True, True)


# The rule by which slots are matched, as a table.

BUSY, MINE, OTHER = "busy", "mine", "other"


def slot(
    id_slot: int,
    name: str | None,
    started_tick: int,
    certainty: int = GUESSED,
    holder: str | None = None,
    *,
    tokens: int = 10,
    task: int | None = None,
) -> Slot:
    """Return a slot with a conversation; freed after its request was sent, unless it is busy."""
    content = SlotContent(chat(name), tokens, (), task) if name else EMPTY
    freed_tick = 0 if holder is BUSY or not started_tick else started_tick + 1
    return Slot(
        id_slot,
        certainty,
        content,
        holder,
        is_sent=holder is BUSY,
        started_tick=started_tick,
        freed_tick=freed_tick,
    )


@pytest.mark.parametrize(
    ("slots", "listed", "expected"),
    [
        pytest.param(
            [slot(1, "a", 1, SEEN), slot(0, "b", 3, SEEN)],
            [seen(1, 4, 9), seen(0, 6, 10)],
            [(1, CONFIRMED, "a"), (0, CONFIRMED, "b")],
            id="equal content at a known number",
        ),
        pytest.param(
            [slot(1, None, 5, CONFIRMED, BUSY), slot(0, "b", 3)],
            [seen(1, 4, 2, is_busy=True), seen(0, 6, 10)],
            [(1, CONFIRMED, None), (0, CONFIRMED, "b")],
            id="a busy slot keeps its number, whatever task began first",
        ),
        pytest.param(
            [slot(0, "a", 1), slot(1, "b", 3)],
            [seen(1, 4, 10), seen(0, 6, 10)],
            [(1, CONFIRMED, "a"), (0, CONFIRMED, "b")],
            id="conversations of equal length by the order of their tasks",
        ),
        pytest.param(
            [slot(1, "a", 1, SEEN), slot(0, "b", 4)],
            [seen(1, 9, 10), seen(0, 6, 10)],
            [(0, CONFIRMED, None), (1, CONFIRMED, "b")],
            id="equal length, but a later request ended here",
        ),
        pytest.param(
            [slot(0, "a", 1), slot(1, "b", 3)],
            [seen(1, -1, 0), seen(0, 6, 10)],
            [(1, GUESSED, None), (0, CONFIRMED, "b")],
            id="a slot that the engine never used holds nothing",
        ),
        pytest.param(
            [slot(0, "a", 1), slot(1, "b", 3)],
            [seen(0, 9, 3), seen(1, 6, 10)],
            [(0, GUESSED, None), (1, CONFIRMED, "b")],
            id="a task of others takes a conversation's place",
        ),
        pytest.param(
            [slot(0, "a", 1, tokens=30), slot(1, "b", 3)],
            [seen(0, 9, 3), seen(1, 6, 29)],
            [(1, CONFIRMED, "a"), (0, GUESSED, None)],
            id="an older slot of equal content: the later one is lost",
        ),
        pytest.param(
            [slot(0, "a", 1, tokens=30), slot(1, "b", 3)],
            [seen(0, 9, 29), seen(1, 6, 10)],
            [(0, CONFIRMED, "a"), (1, GUESSED, None)],
            id="the later one is lost, whatever content an earlier task has",
        ),
        pytest.param(
            [slot(0, "a", 2, tokens=30), slot(1, "b", 2), slot(2, None, 2)],
            [seen(0, 9, 9), seen(1, 7, 3), seen(2, 8, 30)],
            [(2, CONFIRMED, "a"), (0, CONFIRMED, "b"), (1, CONFIRMED, None)],
            id="slots used at once in any order",
        ),
        pytest.param(
            [slot(0, "a", 1, SEEN, task=5), slot(1, "b", 3, SEEN, task=7)],
            [seen(0, 5, 300), seen(1, 9, 10)],
            [(0, CONFIRMED, "a"), (1, GUESSED, None)],
            id="a restored slot by its task, not by its size",
        ),
        pytest.param(
            [slot(0, "a", 1), slot(1, "b", 3, holder=OTHER, tokens=50)],
            [seen(0, 4, 9), seen(1, 6, 2)],
            [(0, CONFIRMED, "a"), (1, CONFIRMED, "b")],
            id="another request has the slot and may have changed it",
        ),
        pytest.param(
            [slot(0, "a", 1), slot(1, "b", 3, holder=MINE, tokens=50)],
            [seen(0, 4, 9), seen(1, 6, 2)],
            [(0, CONFIRMED, "a"), (1, GUESSED, None)],
            id="the request that asks has not changed it",
        ),
        pytest.param([slot(0, "a", 1, SEEN)], [], [], id="an engine that lists nothing"),
    ],
)
def test_slots_are_matched(
    slots: list[Slot], listed: list[SlotState], expected: list[tuple[int, int, str | None]]
) -> None:
    pending = next((slot for slot in slots if slot.holder is MINE), None)
    found = match_slots(slots, listed, pending)
    named = [
        (number, certainty, content.conversation)
        for number, certainty, content in (found[slot] for slot in slots if slot in found)
    ]
    assert named == [
        (number, certainty, chat(name) if name else None) for number, certainty, name in expected
    ]


def test_a_copy_of_an_earlier_turn_does_not_replace_the_latest_one() -> None:
    host_cache = HostCache(1000, 1)
    slot_map = SlotMap(1, host_cache)
    latest = SlotContent(chat("a"), 140, (1, 2, 3))
    taken = Slot(0, previous=latest)
    host_cache.note_copies([latest._replace(tokens=100, blocks=(1, 2))])
    assert slot_map.is_lost_if_named(taken)
    host_cache.note_copies([latest])
    assert not slot_map.is_lost_if_named(taken)
