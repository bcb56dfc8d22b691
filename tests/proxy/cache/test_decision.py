from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.save_policy import (
    IdleBudget,
    NextTurnCase,
    SaveCase,
    due_in_s,
    idle_before_save_s,
    is_worth_copying,
    is_worth_saving,
    pays_to_compute_ahead,
    pays_to_restore,
)

# 2 000 tokens of SmolLM2-135M on one core: 16 s to compute, 20 ms to save.
LONG = SaveCase(2000, 125, save_s=0.02, restore_s=0.01, return_p=0.5, loss_p=0.5)
BESIDE = replace(LONG, streams=2, gap_s=0.025, decoded=200)
PAUSE_MAX_S = 0.2

CASES = st.builds(
    SaveCase,
    tokens=st.integers(1, 100_000),
    prefill_tps=st.floats(1, 10_000),
    save_s=st.floats(0, 10),
    restore_s=st.floats(0, 10),
    return_p=st.floats(0, 1),
    loss_p=st.floats(0, 1),
    streams=st.integers(0, 8),
    gap_s=st.floats(0.001, 1),
    decoded=st.floats(0, 1000),
    waiting=st.integers(0, 8),
)


def pays(case: SaveCase, pause_max_s: float = PAUSE_MAX_S) -> bool:
    """Return whether a save pays now."""
    return is_worth_saving(case, pause_max_s) and due_in_s(case) <= 0


def test_a_long_conversation_is_saved_where_it_may_return_and_be_lost() -> None:
    assert pays(LONG)
    assert not pays(replace(LONG, return_p=0.002))
    assert not pays(replace(LONG, loss_p=0.002))
    assert not pays(replace(LONG, tokens=31))


def test_a_save_within_the_limit_pays_beside_any_number_of_streams() -> None:
    rare = replace(BESIDE, return_p=0.02)
    assert pays(replace(rare, streams=0))
    assert pays(replace(rare, streams=8))


def test_no_pause_of_a_stream_is_longer_than_the_limit() -> None:
    slow = replace(BESIDE, save_s=0.3)
    assert not pays(slow)
    assert pays(replace(slow, streams=0))


def test_streams_are_paused_once_in_150_tokens() -> None:
    soon = replace(BESIDE, decoded=100)
    assert pays(BESIDE)
    assert not pays(soon)
    assert due_in_s(soon) == 50 * 0.025


@pytest.mark.parametrize(
    ("save_s", "usual_return_s", "idle_s"),
    [
        (0.02, 30, 0.25),  # 46 MB
        (1, 30, 0.25),  # 1 GiB, of a person
        (4, 30, 10),  # 4 GiB: not in a pause of 3 s between two turns
        (4, 300, 0.25),  # whose turns are minutes apart
        (1, 5, 0.25),  # of a program that returns after seconds
        (4, 5, 35),
        (40, 30, 3970),  # a slow disk
    ],
)
def test_the_longer_a_save_the_longer_an_engine_is_idle_before(
    save_s: float, usual_return_s: float, idle_s: float
) -> None:
    case = replace(LONG, save_s=save_s, usual_return_s=usual_return_s)
    assert round(idle_before_save_s(case), 6) == idle_s


def test_a_save_for_which_many_requests_miss_a_pass_of_the_engine_does_not_pay() -> None:
    assert pays(replace(BESIDE, waiting=10))
    assert not pays(replace(BESIDE, waiting=100))
    idle = replace(LONG, gap_s=0.025)
    assert pays(replace(idle, waiting=10))
    assert not pays(replace(idle, waiting=100))  # the first of them makes the engine busy
    assert pays(replace(idle, gap_s=5, waiting=1))  # a pass that no request misses


@given(CASES)
def test_the_next_turn_hardly_waits_for_the_save_of_an_idle_engine(case: SaveCase) -> None:
    idle_s = idle_before_save_s(case)
    assert case.save_s / (idle_s + case.usual_return_s) * case.save_s / 2 <= 0.2 + 1e-9


def test_an_unnoticeable_pause_may_come_at_any_time() -> None:
    soon = replace(BESIDE, decoded=0)
    assert pays(replace(soon, save_s=0.006))


@given(CASES, st.floats(0, 1))
def test_what_is_likelier_longer_and_quicker_saved_pays_at_least_as_much(
    case: SaveCase, pause_max_s: float
) -> None:
    if pays(case, pause_max_s):
        assert pays(replace(case, tokens=2 * case.tokens), pause_max_s)
        assert pays(replace(case, return_p=1.0, loss_p=1.0), pause_max_s)
        assert pays(replace(case, save_s=case.save_s / 2), pause_max_s)
        assert pays(replace(case, streams=0), pause_max_s)
        assert pays(replace(case, waiting=0), pause_max_s)
        assert case.saving_s > case.save_s
        assert not case.streams or case.save_s <= pause_max_s


@given(CASES)
def test_a_save_is_due_after_the_wait_for_it(case: SaveCase) -> None:
    wait_s = due_in_s(case)
    assert 0 <= wait_s <= 150 * case.gap_s
    later = replace(case, decoded=case.decoded + wait_s / case.gap_s)
    assert due_in_s(later) < 1e-6


def test_a_file_is_restored_where_it_has_more_than_the_caches() -> None:
    assert pays_to_restore(2000, 10)
    assert not pays_to_restore(31, 1)
    assert not pays_to_restore(200, 101)
    assert not pays_to_restore(-1500, 1)


@pytest.mark.parametrize(
    ("case", "pays"),
    [
        # A recurrent model: all of it is lost, or all but what was computed ahead before.
        (NextTurnCase(4000, 0, return_p=0.5, loss_p=0.5, kept_p=0.0), True),
        (NextTurnCase(4000, 3800, return_p=0.5, loss_p=0.5, kept_p=0.0), True),
        # A template that keeps answers as they were generated.
        (NextTurnCase(4000, 0, return_p=0.5, loss_p=0.5, kept_p=1.0), False),
        # Conversations that seldom return.
        (NextTurnCase(4000, 0, return_p=0.05, loss_p=0.5, kept_p=0.0), False),
        # A model that continues any prefix loses the answer alone.
        (NextTurnCase(4000, 3600, return_p=0.5, loss_p=0.0, kept_p=0.0), True),
        (NextTurnCase(4000, 3980, return_p=0.5, loss_p=0.0, kept_p=0.0), False),
    ],
)
def test_computing_ahead_pays_if_clients_gain_a_tenth_of_the_time(
    case: NextTurnCase,
    pays: bool,  # noqa: FBT001 (a row of the table)
) -> None:
    assert pays_to_compute_ahead(case) is pays


def test_an_engine_works_ahead_for_a_share_of_its_time() -> None:
    budget = IdleBudget(0.2, 0.0)
    assert budget.allows(60.0, 0.0)
    budget.spend(90.0)
    assert not budget.allows(1.0, 100.0)
    assert budget.allows(1.0, 160.0)
    assert not budget.allows(1000.0, 160.0)
    assert budget.allows(1000.0, 500.0)  # longer work waits until all is saved up
    assert not IdleBudget(0.0, 0.0).allows(0.0, 1000.0)


def test_content_is_copied_whose_conversation_probably_returns() -> None:
    assert is_worth_copying(200, 0.8)
    assert not is_worth_copying(200, 0.1)
    assert not is_worth_copying(20, 1.0)  # a file has nearly all of it
