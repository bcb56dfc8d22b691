"""Drafting of a running model: what requests count for, which changes follow, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.samples import engine, machine, model

from supervisor.autoscale.drafts import DraftDecider
from supervisor.autoscale.slots import Change, ModelView
from supervisor.events import Event
from supervisor.fleet.stats import OtherRequests
from supervisor.plan import draft_speed
from supervisor.plan.plan import Plan, TrialSettings, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import Setting
from supervisor.settings.schema import ModelSettings
from supervisor.system.paths import shipped_directory

PATH = Path("/models/chat.gguf")
FINISHED = {"model": "chat", "instance": "chat.0", "status": 200, "duration_ms": 1000.0}
FINISHED |= {"queued_ms": 0.0, "evict_ms": 0.0, "load_ms": 0.0}


def planned(spec_type: Setting | None = None, key: str | None = "key") -> Plan:
    profile = load("speculative", [shipped_directory("profiles")])
    adapted = {"spec-type": spec_type} if spec_type else {}
    entry = ModelEntry("chat", PATH)
    plan = make_plan(entry, profile, engine(), model(), machine(), instances=1, adapted=adapted)
    return replace(plan, draft_key=key)


class Running:
    """One model with an instance whose plan follows the changes, one sample for each request."""

    def __init__(self, directory: Path, settings: ModelSettings | None = None) -> None:
        self.plan, self.now_s, self.in_flight = planned(), 0.0, 0
        self.settings = settings or ModelSettings(path=PATH)
        self.events: list[dict[str, object]] = []
        self.made: list[Change] = []
        others = OtherRequests(lambda _: self.in_flight, lambda: self.now_s)
        self.decider = DraftDecider(lambda *_: self.plan, others, directory, self.emit)

    def emit(self, name: str, /, **fields: object) -> None:
        self.events.append({"name": name, **fields})

    @property
    def spec_type(self) -> object:
        return self.plan.memory_inputs.chosen["spec-type"]

    def sample(self) -> Sequence[Change]:
        self.now_s += 5
        view = ModelView(
            "chat", self.now_s, 0, 0, {"chat.0": 7}, self.plan, planned(), self.settings
        )
        self.decider.sample([view])
        return self.decider.changes(view)

    def ask(self, tokens: int, tokens_per_second: float, **more: Any) -> None:
        fields = {**FINISHED, "decoded_tokens": tokens + 1}
        fields["engine_decode_ms"] = 1000 * tokens / tokens_per_second
        self.decider.observe(Event("request.finished", datetime.now(UTC), {**fields, **more}))

    def run(self, requests: int, *, drafting: float) -> None:
        """Answer requests of 200 tokens at a rate with drafts, or 100/s without; make changes."""
        for _ in range(requests):
            self.sample()
            self.ask(200, drafting if self.spec_type != "none" else 100)
            for change in self.sample():
                self.made.append(change)
                self.plan = planned(change.to)


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path / "speeds")


def test_drafting_goes_off_after_a_trial_and_stays_off_after_a_restart(
    running: Running, tmp_path: Path
) -> None:
    running.run(30, drafting=50)
    (trial,) = running.made
    assert trial.to == Setting("none", "measured", "a trial, against ngram-mod")
    (compared,) = running.events
    assert compared["name"] == "drafts.compared"
    assert (compared["drafts"], compared["speedup"]) == (False, 0.5)
    assert running.spec_type == "none"
    setting = running.decider.adapted("chat", running.plan)["spec-type"]
    assert setting.reason.startswith("decoding was 0.50 times as fast with drafts")
    kept = draft_speed.read(tmp_path / "speeds", "key")
    assert kept
    assert kept.setting == setting


def test_drafting_that_pays_comes_back_after_the_trial(running: Running) -> None:
    running.run(30, drafting=200)
    assert [change.to and change.to.value for change in running.made] == ["none", "ngram-mod"]
    assert running.made[1].reason.startswith("decoding was 2.00 times as fast with drafts")
    assert running.events[0]["drafts"] is True


def test_a_result_is_applied_to_a_model_that_always_has_requests_but_no_trial_begins(
    running: Running,
) -> None:
    running.sample()
    for _ in range(12):
        running.ask(200, 200)
    (change,) = running.sample()
    for _ in range(700):
        (change,) = running.sample()
    assert not change.is_urgent
    running.plan = planned(change.to)
    for _ in range(12):
        running.ask(200, 100)
    (change,) = running.sample()
    assert (change.to and change.to.value, change.is_urgent) == ("ngram-mod", False)
    for _ in range(30):
        (change,) = running.sample()
    assert change.is_urgent


def test_a_trial_that_cannot_begin_is_given_up(running: Running) -> None:
    running.sample()
    for _ in range(12):
        running.ask(200, 200)
    wanted = [bool(running.sample()) for _ in range(800)]
    assert wanted == sorted(wanted, reverse=True)
    assert 700 < sum(wanted) < 730
    for _ in range(20):
        running.ask(200, 200)
    assert running.sample() == ()


@pytest.mark.parametrize("left_out", [{"status": 500}, {"decoded_tokens": 3}, {"model": "code"}])
def test_other_requests_do_not_count(running: Running, left_out: dict[str, Any]) -> None:
    running.sample()
    for _ in range(20):
        running.ask(200, 100, **left_out)
    assert running.sample() == ()


def test_another_draft_ends_the_trial_of_the_one_before(running: Running) -> None:
    running.sample()
    running.plan = planned(Setting("none", "measured", "a trial"), "another draft")
    (change,) = running.sample()
    assert (change.to, change.reason) == (None, "its draft has changed")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (ModelSettings(path=PATH, trial=TrialSettings(profile="base", share=0.5)), "key"),
        (None, None),
    ],
)
def test_a_trial_of_the_user_or_a_set_value_is_left_alone(
    tmp_path: Path, settings: ModelSettings | None, key: str | None
) -> None:
    running = Running(tmp_path, settings)
    running.plan = planned(key=key)
    running.run(20, drafting=50)
    assert running.made == []
