"""Which slot a turn is sent to, and how the engine's own page puts a wrong belief right."""

from __future__ import annotations

from proxy.engine.slots import Seen
from proxy.home.berths import Berth, Berths
from proxy.home.chain import Chain, Filled
from proxy.home.prefix import Prompt, read_prompt
from proxy.pages import Kind

NOW_S = 100.0
LATER_S = 200.0


def talk_in(berths: Berths, talk: str, tokens: int, *, now_s: float = NOW_S) -> Berth:
    """Have a conversation's turn asked and answered."""
    holder = object()
    berth = berths.board(holder, talk, now_s)
    assert berth
    berths.depart(berth)
    berths.leave(holder, now_s)
    berths.know(berth, talk, tokens)
    return berth


def seen(slot: int, task: int, tokens: int, *, is_busy: bool = False) -> Seen:
    return Seen(slot, task, tokens, is_busy)


def test_an_engine_is_taken_to_begin_with_its_last_slot() -> None:
    berths = Berths(4)
    assert [talk_in(berths, talk, 10).slot for talk in "abcd"] == [3, 2, 1, 0]


def test_then_it_takes_the_slot_used_longest_ago() -> None:
    berths = Berths(2)
    assert [talk_in(berths, talk, 10).slot for talk in "abcd"] == [1, 0, 1, 0]


def test_a_turn_goes_back_to_the_slot_of_its_conversation() -> None:
    berths = Berths(4)
    first, _ = talk_in(berths, "a", 10), talk_in(berths, "b", 10)
    assert berths.board(object(), "a", NOW_S) is first


def test_a_slot_in_use_is_given_to_nobody_else() -> None:
    berths = Berths(2)
    held = talk_in(berths, "a", 10)
    assert berths.board("one", "a", NOW_S) is held
    assert berths.board("another", "a", NOW_S) is not held
    assert berths.board("a third", "a", NOW_S) is None


def test_one_whose_slot_was_taken_meanwhile_holds_nothing_there() -> None:
    berths = Berths(1)
    talk_in(berths, "a", 10)
    talk_in(berths, "b", 10)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    assert berth.talk is None


def test_a_guess_is_not_sure_until_the_engine_says_so() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    assert not berth.is_sure
    berths.confirm([seen(0, -1, 0), seen(1, 7, 9)], berth, NOW_S)
    assert (berth.slot, berth.is_sure) == (1, True)


def test_what_is_sure_stays_so_over_the_next_turns() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    berth = berths.board("turn", "a", NOW_S)
    assert berth
    berths.confirm([seen(0, -1, 0), seen(1, 7, 9)], berth, NOW_S)
    berths.depart(berth)
    berths.leave("turn", NOW_S)
    berths.know(berth, "a", 20)
    assert berths.board("next", "a", NOW_S) is berth
    assert berth.is_sure


def test_after_a_pause_nothing_is_sure() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    berth = berths.board("turn", "a", NOW_S)
    assert berth
    berths.confirm([seen(1, 7, 9)], berth, NOW_S)
    berths.leave("turn", NOW_S)
    berths.know(berth, "a", 20)
    assert berths.board("next", "a", LATER_S) is berth
    assert not berth.is_sure


def test_a_warm_up_that_nobody_told_of_moves_all_by_one() -> None:
    berths = Berths(3)
    talk_in(berths, "a", 10)
    talk_in(berths, "b", 30)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    berths.confirm([seen(2, 0, 1), seen(1, 5, 9), seen(0, 9, 29)], berth, NOW_S)
    assert (berth.slot, berth.is_sure) == (1, True)


def test_equal_lengths_are_told_apart_by_the_order_of_asking() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    talk_in(berths, "b", 10)
    berth = berths.board(object(), "b", NOW_S)
    assert berth
    berths.confirm([seen(0, 3, 9), seen(1, 8, 9)], berth, NOW_S)
    assert berth.slot == 1


def test_a_probe_in_its_slot_ends_a_conversation_there() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    talk_in(berths, "b", 30)
    berth = berths.board(object(), "a", LATER_S)
    assert berth
    berths.confirm([seen(1, 99, 1), seen(0, 8, 29)], berth, LATER_S)
    assert not berth.is_sure
    changed = berths.change(berth, "a", LATER_S)
    assert changed
    assert changed.talk is None
    kept = berths.board(object(), "b", LATER_S)
    assert kept
    assert (kept.slot, kept.is_sure) == (0, True)


def test_slots_in_use_belong_to_those_who_use_them() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    running = berths.board("runs", "b", NOW_S)
    assert running
    berths.depart(running)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    berths.confirm([seen(0, 3, 9), seen(1, 8, 4, is_busy=True)], berth, NOW_S)
    assert (berth.slot, running.slot) == (0, 1)


def test_an_engine_that_says_nothing_leaves_nothing_sure() -> None:
    berths = Berths(2)
    talk_in(berths, "a", 10)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    berths.confirm([], berth, NOW_S)
    assert not berth.is_sure


def test_slots_used_at_once_are_found_in_any_order() -> None:
    berths = Berths(4)
    for talk, tokens in (("a", 10), ("b", 30), ("c", 50)):
        talk_in(berths, talk, tokens)
    berth = berths.board("turn", "c", NOW_S)
    assert berth
    assert berths.pass_by(berth) == [0, 2, 3]
    berths.depart(berth)
    berths.leave("turn", NOW_S)
    berths.know(berth, "c", 60)
    page = [seen(1, 10, 59), seen(3, 7, 9), seen(2, 9, 29), seen(0, 8, 0)]
    for talk, slot in (("a", 3), ("b", 2), ("c", 1)):
        berth = berths.board(talk, talk, LATER_S)
        assert berth
        berths.confirm(page, berth, LATER_S)
        assert (berth.talk, berth.slot, berth.is_sure) == (talk, slot, True)


def test_slots_in_use_are_not_passed_by() -> None:
    berths = Berths(3)
    talk_in(berths, "a", 10)
    assert berths.board("runs", "b", NOW_S)
    berth = berths.board(object(), "a", NOW_S)
    assert berth
    assert berths.pass_by(berth) == [0]


def test_what_came_after_the_last_task_began_is_not_put_aside_yet() -> None:
    berths = Berths(3)
    first = talk_in(berths, "a", 10)
    new = berths.board("new", None, NOW_S)
    assert new
    assert berths.is_unsaved(new)
    assert not berths.is_unsaved(first)
    berths.depart(new)
    assert not berths.is_unsaved(new)


def test_who_is_led_gets_the_oldest_slot_whose_number_is_sure() -> None:
    berths = Berths(3)
    talk_in(berths, "a", 10)
    new = berths.board("new", None, NOW_S)
    assert new
    assert berths.lead(new) is new  # none is sure
    # Somebody else was in slot 2, of which we thought that it was never used.
    berths.confirm([seen(0, -1, 0), seen(1, 7, 9), seen(2, 3, 5)], new, NOW_S)
    led = berths.lead(new)
    assert (led.slot, led.is_sure, led.holder, led.talk) == (0, True, "new", None)
    assert new.holder is None
    assert berths.pass_by(led) == [2, 1]
    assert not berths.is_unsaved(led)


# What was filled from a disk.


def prompt(text: str) -> Prompt:
    read = read_prompt(Kind.COMPLETION, "chat", {"prompt": text})
    assert read
    return read


STORY = prompt("a story " * 40)
LONGER = prompt("a story " * 80)


def filled(slot: int, task: int, tokens: int = 300) -> Filled:
    return Filled(slot, task, tokens, Chain((1,), STORY.blocks))


def test_a_slot_that_was_filled_is_sure_once_the_engine_was_looked_at() -> None:
    berths = Berths(2)
    berths.fill(filled(0, -1), "a")
    berth = berths.board("turn", "a", NOW_S)
    assert berth
    assert (berth.slot, berth.is_sure) == (0, False)
    berths.confirm([seen(0, -1, 0), seen(1, 0, 7)], berth, NOW_S)
    assert berth.is_sure
    assert berth.proves(LONGER)


def test_each_that_was_filled_is_looked_at_by_the_request_that_asks_for_it() -> None:
    """Who uses an idle engine for something else may have been there since the last look."""
    berths = Berths(2)
    berths.fill(filled(0, 3), "a")
    berths.fill(filled(1, 5), "b")
    first = berths.board("turn", "a", NOW_S)
    assert first
    berths.confirm([seen(0, 3, 300), seen(1, 5, 300)], first, NOW_S)
    second = berths.board("another", "b", NOW_S)
    assert second
    assert not second.is_sure
    berths.confirm([seen(0, 8, 300, is_busy=True), seen(1, 9, 300)], second, NOW_S)
    assert not second.is_sure
    assert second.talk is None


def test_a_new_conversation_gets_the_slot_that_the_engine_would_take() -> None:
    berths = Berths(3)
    berths.fill(filled(0, 3), "a")
    berths.fill(filled(2, 5), "b")
    berth = berths.board("turn", "c", NOW_S)
    assert berth
    assert berth.slot == 1
    berth = berths.board("another", "d", NOW_S)
    assert berth
    assert berth.slot == 0


def test_only_the_first_that_goes_on_from_there_proves_anything() -> None:
    berths = Berths(1)
    berths.fill(filled(0, 3), "a")
    berth = berths.board("turn", "a", NOW_S)
    assert berth
    assert not berth.proves(LONGER)  # the engine was not looked at
    berths.confirm([seen(0, 3, 300)], berth, NOW_S)
    assert berth.proves(LONGER)
    assert berth.proves(STORY)
    assert not berth.proves(prompt("another " * 80))
    assert not berth.proves(prompt("a story " * 20))
    assert not berth.proves(None)
    berths.depart(berth)
    assert not berth.proves(LONGER)


def test_of_what_nothing_is_known_nothing_is_proved() -> None:
    berths = Berths(1)
    berths.fill(Filled(0, 3, 300), None)
    berth = berths.board("turn", "a", NOW_S)
    assert berth
    berths.confirm([seen(0, 3, 300)], berth, NOW_S)
    assert not berth.proves(LONGER)


def test_idle_slots_that_are_known_are_told() -> None:
    berths = Berths(3)
    talk_in(berths, "a", 10)
    talk_in(berths, "b", 30)
    running = berths.board("runs", "c", NOW_S)
    assert running
    berths.depart(running)
    page = [seen(2, 4, 9), seen(1, 6, 30), seen(0, 9, 5, is_busy=True)]
    assert {slot: berth.talk for slot, berth in berths.held(page, NOW_S).items()} == {
        1: "b",
        2: "a",
    }
