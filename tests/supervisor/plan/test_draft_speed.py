"""Whether a model drafts: trials of the other side, at equal load, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from supervisor.plan import draft_speed
from supervisor.plan.draft_speed import DraftSpeed, count, decide

# Tokens per second, by whether the model drafts and the number of busy slots.
Rates = Mapping[tuple[bool, int], float]


class Traffic:
    """Requests of 100 tokens, with an idle moment after each in which a change is made."""

    def __init__(self, busy: Callable[[int], int] = lambda _: 1) -> None:
        self.speed = DraftSpeed("ngram-mod")
        self.drafts = True
        self.busy = busy
        self.requests = 0
        self.seconds = 0.0
        self.changes: list[int] = []  # the tokens before each change

    def go_on(self, rates: Rates, requests: int) -> None:
        for _ in range(requests):
            busy = self.busy(self.requests)
            took_s = 100 / rates[self.drafts, busy]
            self.speed = count(
                self.speed, drafts=self.drafts, busy=busy, tokens=100, seconds=took_s
            )
            self.requests += 1
            self.seconds += took_s
            self.speed, drafts = decide(self.speed, drafts=self.drafts)
            if drafts != self.drafts:
                self.changes.append(100 * self.requests)
            self.drafts = drafts


def alone(drafting: float) -> Rates:
    return {(True, 1): drafting, (False, 1): 100.0}


def test_drafting_that_loses_is_turned_off_and_tried_again_ever_more_rarely() -> None:
    traffic = Traffic()
    traffic.go_on(alone(50), 16_000)
    # The first trial, without drafts, is won; those with drafts are clearly slower, and end early.
    trials = [102_300, 302_700, 703_100, 1_503_500]
    assert traffic.changes == [300, *(at for began in trials for at in (began, began + 400))]
    assert not traffic.drafts
    assert traffic.speed.speedup == pytest.approx(0.5)
    setting = traffic.speed.setting
    assert setting
    assert setting.value == "none"
    assert setting.reason.startswith(
        "decoding was 0.50 times as fast with drafts, with 1 busy slot"
    )


@pytest.mark.parametrize("drafting", [15, 30, 80, 98, 100, 103, 130, 300])
def test_it_is_never_much_slower_than_without_nor_than_the_better_side(drafting: float) -> None:
    traffic = Traffic()
    traffic.go_on(alone(drafting), 2000)
    rate = 100 * traffic.requests / traffic.seconds
    assert rate >= 0.98 * 100
    assert rate >= 0.97 * max(100, drafting)


def test_a_trial_that_loses_much_ends_at_its_second_request_and_is_repeated_later() -> None:
    traffic = Traffic()
    traffic.go_on(alone(2), 5000)
    # 200 tokens took the time of 10 000, so the next trial is 100 times their difference away.
    assert traffic.changes == [300, 102_300, 102_500]
    assert traffic.speed.pause_tokens == pytest.approx(980_000)


def test_drafting_that_pays_stays_and_says_so() -> None:
    traffic = Traffic()
    traffic.go_on(alone(190), 500)
    assert traffic.drafts
    assert traffic.changes == [300, 700]
    setting = traffic.speed.setting
    assert setting
    assert (setting.value, setting.origin) == ("ngram-mod", "measured")
    assert "1.90 times as fast with drafts" in setting.reason


def test_it_comes_back_when_it_pays_again() -> None:
    traffic = Traffic()
    traffic.go_on(alone(50), 500)
    assert not traffic.drafts
    traffic.go_on(alone(200), 1500)
    assert traffic.drafts


def test_a_small_difference_changes_nothing() -> None:
    traffic = Traffic()
    traffic.go_on(alone(99), 500)
    assert traffic.drafts


def test_a_side_that_has_become_slower_than_the_other_was_is_compared_early() -> None:
    traffic = Traffic()
    traffic.go_on(alone(50), 500)
    assert not traffic.drafts
    traffic.go_on({(True, 1): 50.0, (False, 1): 40.0}, 200)
    assert traffic.drafts


def test_the_time_between_trials_has_a_limit() -> None:
    late = DraftSpeed("ngram-mod", pause_tokens=1_500_000)
    assert draft_speed.postpone(late).pause_tokens == 1_600_000


def test_many_busy_slots_turn_it_off_although_it_pays_alone() -> None:
    rates = {(True, 1): 150.0, (False, 1): 100.0, (True, 8): 30.0, (False, 8): 50.0}
    traffic = Traffic(lambda number: 1 if number < 300 else 8)
    traffic.go_on(rates, 300)
    assert traffic.changes == [300, 700]
    # Nothing is known of the other side at this load, so its trial does not wait for its time.
    traffic.go_on(rates, 200)
    assert not traffic.drafts
    assert 30_000 < traffic.changes[-1] < 50_000


def test_sides_are_compared_at_equal_load() -> None:
    own = {1: (1000.0, 10.0), 4: (1000.0, 40.0)}
    assert DraftSpeed("draft-simple", own=own).others_speed(own) is None
    assert DraftSpeed("draft-simple", own=own, other={1: (63, 1.0)}).others_speed(own) is None
    slower_at_each = DraftSpeed("draft-simple", own=own, other={1: (100, 1.25), 4: (900, 45.0)})
    assert slower_at_each.others_speed(own) == pytest.approx(0.8)
    mostly_alone = {1: (1500.0, 15.0), 4: (500.0, 20.0)}
    speed = DraftSpeed("draft-simple", own=mostly_alone, other={4: (900, 45.0), 2: (800, 20.0)})
    assert speed.others_speed(speed.own) is None
    assert speed.others_speed(speed.other) == pytest.approx(0.8)


def test_a_trial_without_a_comparable_request_ends() -> None:
    traffic = Traffic(lambda number: 1 if number < 3 else 8)
    rates = {(drafts, busy): 100.0 for drafts in (True, False) for busy in (1, 8)}
    traffic.go_on(rates, 100)
    assert traffic.changes == [300, 8300]
    assert traffic.drafts
    assert traffic.speed.setting is None


def test_speeds_are_kept_in_a_file(tmp_path: Path) -> None:
    traffic = Traffic()
    traffic.go_on(alone(50), 100)
    draft_speed.write(tmp_path / "speeds", "key", traffic.speed)
    assert draft_speed.read(tmp_path / "speeds", "key") == traffic.speed
    (tmp_path / "speeds" / "key.json").write_text('{"spec_type": 1}')
    assert draft_speed.read(tmp_path / "speeds", "key") is None
    assert draft_speed.read(tmp_path / "speeds", "other") is None
