"""When a serving instance counts as hung, by sequences of samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.engine.child import ProcessorTime
from supervisor.engine.health import (
    CounterSample,
    HealthAction,
    HealthSample,
    has_moved,
    next_action,
    recovery_timeout_s,
    start,
    update,
)
from supervisor.settings.tables import HealthSettings

SETTINGS = HealthSettings(liveness_interval_s=4, idle_probe_s=60, batch_timeout_s=100)
ALWAYS = 10_000.0
UNUSED = ProcessorTime(0, 0)

Of = Callable[[float], float]


def never(_: float) -> float:
    return 0


def until(end_s: float, step_s: float = 0.1) -> Of:
    """Return a counter that grows every `step_s`, and stands still from `end_s` on."""
    return lambda at_s: min(at_s, end_s) // step_s


def watch(
    *,
    awaited: Of = lambda _: 1,
    sent: Of = never,
    decoded: Of = never,
    cpu_s: Of = never,
    waited_s: Of = never,
    answers: bool = True,
    gap: tuple[float, float] = (ALWAYS, 0),
    settings: HealthSettings = SETTINGS,
    for_s: float = 300,
) -> Iterator[tuple[float, HealthAction]]:
    """Watch an engine whose counters are functions of time; yield each need with its time.

    Reading counters takes no time here. `gap` is when the watch stood still, and for how long.
    """

    def read(at_s: float, counters: CounterSample | None = None) -> HealthSample:
        return HealthSample(at_s, int(awaited(at_s)), int(sent(at_s)), counters)

    now_s, health = 0.0, start(read(0))
    while now_s < for_s:
        now_s += settings.tick_s + (gap[1] if gap[0] <= now_s < gap[0] + settings.tick_s else 0)
        health = update(settings, health, read(now_s))
        need = next_action(settings, health)
        if need == "read counters":
            time = ProcessorTime(cpu_s(now_s), waited_s(now_s))
            counters = ((decoded(now_s),) if answers else None, time)
            health = update(settings, health, read(now_s, counters))
            yield now_s, need
            need = next_action(settings, health)
        if need == "look at process":
            health = update(settings, health, replace(read(now_s), is_suspended=False))
            need = next_action(settings, health)
        yield now_s, need
        if need == "withdraw":
            return


def withdrawn_at_s(story: Iterator[tuple[float, HealthAction]]) -> float | None:
    return next((at_s for at_s, need in story if need == "withdraw"), None)


@pytest.mark.parametrize("end_s", [0, 0.3, 7.9, 50])
def test_one_that_stops_is_found_within_two_intervals(end_s: float) -> None:
    found_s = withdrawn_at_s(watch(sent=until(end_s), answers=False, cpu_s=until(end_s, 1)))
    assert found_s is not None
    assert (
        1.25 * SETTINGS.liveness_interval_s <= found_s - end_s <= 2 * SETTINGS.liveness_interval_s
    )


def test_one_that_answers_but_moves_nothing_is_found_as_soon() -> None:
    found_s = withdrawn_at_s(watch(answers=True))
    assert found_s is not None
    assert found_s <= 2 * SETTINGS.liveness_interval_s


def test_bytes_alone_prove_life_and_need_no_query() -> None:
    assert {need for _, need in watch(sent=until(ALWAYS))} == {"nothing"}


def test_batches_without_bytes_are_life() -> None:
    assert withdrawn_at_s(watch(decoded=until(ALWAYS, step_s=3))) is None


def test_one_long_batch_is_life_as_long_as_it_computes() -> None:
    computing = watch(cpu_s=lambda at_s: 0.2 * at_s, for_s=90)
    assert withdrawn_at_s(computing) is None
    silent = watch(cpu_s=lambda at_s: 0.2 * at_s, answers=False, for_s=90)
    assert withdrawn_at_s(silent) is None


def test_one_that_computes_for_ever_without_a_result_is_given_up() -> None:
    found_s = withdrawn_at_s(watch(cpu_s=lambda at_s: at_s))
    assert found_s is not None
    assert (
        SETTINGS.batch_timeout_s
        <= found_s
        <= SETTINGS.batch_timeout_s + SETTINGS.liveness_interval_s
    )


def test_a_batch_may_take_as_much_longer_as_it_waits_for_a_processor() -> None:
    found_s = withdrawn_at_s(
        watch(cpu_s=lambda at_s: 0.1 * at_s, waited_s=lambda at_s: 0.9 * at_s, for_s=2_000)
    )
    assert found_s is not None
    assert found_s == pytest.approx(10 * SETTINGS.batch_timeout_s, rel=0.05)


def test_the_wait_for_a_processor_has_an_end() -> None:
    found_s = withdrawn_at_s(watch(waited_s=lambda at_s: at_s, for_s=10_000))
    assert found_s is not None


def test_one_that_stops_in_a_long_batch_is_found_within_two_intervals() -> None:
    found_s = withdrawn_at_s(watch(cpu_s=lambda at_s: min(at_s, 30.0)))
    assert found_s is not None
    assert found_s - 30 <= 2 * SETTINGS.liveness_interval_s


def test_answering_our_questions_is_not_computing() -> None:
    assert withdrawn_at_s(watch(cpu_s=lambda at_s: 0.001 * at_s)) is not None


def test_where_nothing_tells_the_processor_time_counters_must_do() -> None:
    before = start(HealthSample(0, 1, 0))
    blind = ((1.0,), None)
    health = update(SETTINGS, before, HealthSample(1, 1, 0, blind))
    health = update(SETTINGS, health, HealthSample(3, 1, 0, blind))
    assert health.computed_at_s == 0
    assert update(SETTINGS, health, HealthSample(5, 1, 0, ((2.0,), None))).progress_at_s == 3


def test_an_answer_missed_is_no_movement_when_the_next_comes() -> None:
    health = start(HealthSample(0, 1, 0))
    for at_s, counters in (
        (1, ((1.0,), UNUSED)),
        (2, (None, UNUSED)),
        (3, ((1.0,), UNUSED)),
    ):
        health = update(SETTINGS, health, HealthSample(at_s, 1, 0, counters))
    assert health.progress_at_s == 0
    assert update(SETTINGS, health, HealthSample(4, 1, 0, ((2.0,), UNUSED))).progress_at_s == 3


def test_what_was_answered_before_a_missed_answer_is_remembered() -> None:
    health = start(HealthSample(0, 1, 0))
    for at_s, counters in (
        (1, ((1.0,), UNUSED)),
        (2, (None, UNUSED)),
        (3, ((2.0,), UNUSED)),
    ):
        health = update(SETTINGS, health, HealthSample(at_s, 1, 0, counters))
    assert health.progress_at_s == 2


def test_it_is_asked_no_more_often_than_every_two_seconds() -> None:
    looks = [at_s for at_s, need in watch(cpu_s=lambda at_s: at_s) if need == "read counters"]
    assert min(after - before for before, after in itertools.pairwise(looks)) >= 2
    assert looks[0] >= SETTINGS.liveness_interval_s / 2


def test_who_waits_for_a_slow_client_is_not_blamed() -> None:
    assert withdrawn_at_s(watch(awaited=never)) is None


def test_work_that_begins_after_a_long_rest_gets_its_whole_time() -> None:
    found_s = withdrawn_at_s(watch(awaited=lambda at_s: at_s >= 50))
    assert found_s is not None
    assert (
        50 + 1.25 * SETTINGS.liveness_interval_s <= found_s <= 50 + 2 * SETTINGS.liveness_interval_s
    )


def test_clients_that_come_and_go_do_not_make_it_look_alive() -> None:
    found_s = withdrawn_at_s(watch(awaited=lambda at_s: 1 + at_s // 1 % 2))
    assert found_s is not None
    assert found_s <= 2 * SETTINGS.liveness_interval_s


@pytest.mark.parametrize("pause_s", [4.1, 60, 86_400])
def test_a_pause_of_ours_begins_everything_anew(pause_s: float) -> None:
    story = watch(sent=until(2), answers=False, gap=(5, pause_s), for_s=pause_s + 5 + 6)
    assert withdrawn_at_s(story) is None


def test_a_rest_brings_a_probe_once_in_a_while_and_work_replaces_it() -> None:
    rest = [at_s for at_s, need in watch(awaited=never, for_s=61) if need == "probe"]
    assert rest[0] == 60
    worked = watch(awaited=never, sent=until(30), for_s=85)
    assert {need for _, need in worked} == {"nothing"}


@pytest.mark.parametrize(("probe_s", "need"), [(60, "probe"), (0, "nothing")])
def test_one_that_did_not_answer_clients_is_probed_at_once(
    probe_s: float, need: HealthAction
) -> None:
    settings = HealthSettings(liveness_interval_s=4, idle_probe_s=probe_s)
    health = update(settings, start(HealthSample(0, 0, 0)), HealthSample(1, 0, 0, is_silent=True))
    assert next_action(settings, health) == need


def test_a_probe_can_be_turned_off() -> None:
    calm = watch(
        awaited=never, settings=HealthSettings(liveness_interval_s=4, idle_probe_s=0), for_s=300
    )
    assert {need for _, need in calm} == {"nothing"}


@given(
    interval_s=st.floats(1, 600),
    sends=st.lists(st.floats(0.01, 1.2), min_size=1, max_size=40),
)
def test_who_sends_something_within_each_interval_is_never_withdrawn(
    interval_s: float, sends: list[float]
) -> None:
    settings = HealthSettings(liveness_interval_s=interval_s)
    moments = [sum(sends[: n + 1]) * interval_s for n in range(len(sends))]
    story = watch(
        sent=lambda at_s: sum(moment <= at_s for moment in moments),
        answers=False,
        settings=settings,
        for_s=moments[-1],
    )
    assert withdrawn_at_s(story) is None


@given(interval_s=st.floats(1, 600), end=st.floats(0, 5), computes=st.booleans())
def test_who_stands_still_for_two_intervals_always_is(
    interval_s: float, end: float, *, computes: bool
) -> None:
    settings = HealthSettings(liveness_interval_s=interval_s)
    end_s = end * interval_s
    story = watch(
        decoded=lambda at_s: min(at_s, end_s) if computes else 0,
        cpu_s=lambda at_s: min(at_s, end_s),
        settings=settings,
        for_s=100 * interval_s,
    )
    found_s = withdrawn_at_s(story)
    assert found_s is not None
    assert found_s - end_s <= 2 * interval_s


def test_work_has_moved_by_bytes_or_by_counters_and_not_by_silence() -> None:
    before = HealthSample(0, 1, 5, ((1.0,), UNUSED))
    assert not has_moved(before, HealthSample(1, 1, 5, ((1.0,), ProcessorTime(9, 0))))
    assert not has_moved(before, HealthSample(1, 1, 5, (None, ProcessorTime(9, 0))))
    assert not has_moved(before, HealthSample(1, 1, 5))
    assert has_moved(before, HealthSample(1, 1, 5, ((2.0,), UNUSED)))
    assert has_moved(before, HealthSample(1, 1, 6))


def test_an_unwell_engine_has_little_time_if_it_is_urgent() -> None:
    assert recovery_timeout_s(SETTINGS, 60, is_urgent=True) == 4
    assert recovery_timeout_s(SETTINGS, 60, is_urgent=False) == 60
    assert recovery_timeout_s(SETTINGS, 2, is_urgent=True) == 2


def looks(suspended: Callable[[float], bool], for_s: float = 50) -> tuple[int, float | None]:
    """Watch an idle process; return how often it was looked at, and when it was withdrawn."""
    now_s, count, is_suspended = 0.0, 0, None
    health = start(HealthSample(now_s, 0, 0))
    while now_s < for_s:
        now_s += SETTINGS.tick_s
        sample = HealthSample(now_s, 0, 0, is_suspended=is_suspended)
        health = update(SETTINGS, health, sample)
        action, is_suspended = next_action(SETTINGS, health), None
        if action == "withdraw":
            return count, now_s
        if action == "look at process":
            count, is_suspended = count + 1, suspended(now_s)
    return count, None


@pytest.mark.parametrize("stopped_at_s", [0, 1.9, 4, 10.2])
def test_an_idle_process_that_stays_suspended_is_found_within_three_intervals(
    stopped_at_s: float,
) -> None:
    _, found_at_s = looks(lambda at_s: at_s >= stopped_at_s)
    assert found_at_s is not None
    assert found_at_s - stopped_at_s <= 3 * SETTINGS.liveness_interval_s


def test_one_that_was_suspended_for_a_moment_is_left_alone_and_seldom_looked_at() -> None:
    count, found_at_s = looks(lambda at_s: 8 <= at_s < 11)
    assert found_at_s is None
    assert count <= 50 / SETTINGS.liveness_interval_s
