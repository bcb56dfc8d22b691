"""Events are counted for the side of their instance; figures outlast the daemon, not the trial."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.instance_harness import RecordingTraffic
from support.trial_requests import FIRST, RATE, request, values

from supervisor.events import Event
from supervisor.experiments.trials import Trials
from supervisor.experiments.verdict import SIDES
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import LaunchFingerprint
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings
from supervisor.system import files
from supervisor.system.paths import Directories

FILE = (Path("/models/chat.gguf"), 1, 1)
BASE = LaunchFingerprint(FILE, (), FILE, None, {"parallel": 4}, ())
TRIED = replace(BASE, flags={"parallel": 1})
SHARED = {"profile": "low-memory", "share": 0.2}


def fleet_of(directory: Path, trial: Mapping[str, Any] | None = None, replicas: int = 1) -> Fleet:
    table = {"path": "/models/chat.gguf", "replicas": replicas, "trial": trial}
    planner = LaunchPlanner(Settings(models={"chat": table}), Directories(*[directory] * 5))
    return Fleet(planner, RecordingTraffic(), lambda *_, **__: None)


def observed(
    fleet: Fleet, directory: Path, in_flight: int = 0, ready: tuple[str, ...] = ("chat.0", "chat.1")
) -> Trials:
    """Return an observer of a fleet whose instances have started."""
    for replica in fleet.all_replicas():
        is_trial = replica.planner.trial_at(replica.place) is not None
        replica.fingerprint = TRIED if is_trial else BASE
    return Trials(
        fleet,
        lambda _: in_flight,
        directory / "trials",
        lambda: 0.0,
        lambda replica: replica.name in ready,
    )


def finished(instance: str, conversation: int = 1, **changes: Any) -> Event:
    fields = {"model": "chat", "instance": instance, **request(conversation, **changes)}
    return Event("request.finished", datetime.now(tz=UTC), fields)


def event(name: str, instance: str, **fields: Any) -> Event:
    return Event(name, datetime.now(tz=UTC), {"model": "chat", "instance": instance, **fields})


async def saved(trials: Trials) -> None:
    """Serve until it is cancelled, which saves."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await trials.serve()


def test_requests_and_crashes_count_for_the_side_of_their_instance(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path, SHARED, replicas=2), tmp_path, in_flight=3)
    for number, name in enumerate(("chat.0", "chat.1", "chat.2", "chat.2")):
        trials.observe(finished(name, 1 + number))
    trials.observe(event("instance.exited", "chat.2", fault=True))
    trials.observe(event("instance.exited", "chat.2", fault=False))
    trials.observe(finished("chat.9"))
    trial = trials.of("chat")
    assert trial
    base, tried = trial.figures.sides["base"], trial.figures.sides["trial"]
    assert (base.requests, tried.requests, base.others) == (2, 2, 6)
    assert (base.crashes, tried.crashes) == (0, 1)


def test_what_one_side_answers_alone_has_no_values(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path, ready=("chat.0",))
    trials.observe(finished("chat.0"))
    trial = trials.of("chat")
    assert trial
    base = trial.figures.sides["base"]
    assert (base.requests, base.values(RATE), base.excluded) == (1, [], 1)


def test_requests_that_overlapped_are_counted(tmp_path: Path) -> None:
    now_s = 0.0
    fleet = fleet_of(tmp_path, SHARED)
    observed(fleet, tmp_path)
    trials = Trials(fleet, lambda _: 0, tmp_path / "trials", lambda: now_s, lambda _: True)
    for number, at_s in enumerate((10.0, 10.5, 12.0, 12.1), 1):  # each takes 0.9 s
        now_s = at_s
        trials.observe(finished("chat.1", number))
    trial = trials.of("chat")
    assert trial
    found = trial.figures.sides["trial"].values(FIRST)
    assert [others for entry in found for _, others in entry] == [0, 1, 0, 1]


def test_a_model_without_a_trial_is_not_observed(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path), tmp_path)
    trials.observe(finished("chat.0"))
    assert trials.of("chat") is None
    assert trials.of("code") is None


@pytest.mark.parametrize("changed", ["chat.0", "chat.1"])
def test_other_flags_on_a_side_begin_new_figures(tmp_path: Path, changed: str) -> None:
    fleet = fleet_of(tmp_path, SHARED)
    trials = observed(fleet, tmp_path)
    trials.observe(finished("chat.1"))
    fleet.replica(changed).fingerprint = None  # it is planned anew
    assert trials.of("chat").requests == 1  # type: ignore[union-attr]  # it has one
    fleet.replica(changed).fingerprint = replace(BASE, flags={"parallel": 9})
    assert trials.of("chat").requests == 0  # type: ignore[union-attr]  # it has one


async def test_figures_outlast_the_daemon_and_hold_no_text(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path)
    for number in (1, 2):
        trials.observe(finished("chat.1", number))
    trials.observe(finished("chat.0", 3, status=502))
    await saved(trials)
    (path,) = (tmp_path / "trials").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "chat" not in path.name

    again = observed(fleet_of(tmp_path, SHARED), tmp_path)
    trial = again.of("chat")
    assert trial
    assert values(trial.figures.sides["trial"].values(RATE)) == [[100.0], [100.0]]
    assert trial.figures.sides["base"].errors == 1
    again.observe(finished("chat.1", 1))  # another conversation than that of the first daemon
    assert len(trial.figures.sides["trial"].values(RATE)) == 3


async def test_a_trial_that_was_ended_begins_anew(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, SHARED)
    trials = observed(fleet, tmp_path)
    trials.observe(finished("chat.1"))
    await saved(trials)
    fleet.planner = fleet_of(tmp_path).planner
    assert trials.of("chat") is None
    assert not list((tmp_path / "trials").iterdir())


@pytest.mark.parametrize(
    "altered",
    [
        "",
        "[]",
        '{"age_s": 1}',
        '{"age_s": -1, "base": {}, "trial": {}}',
        '{"age_s": 1e400, "base": {}, "trial": {}}',
    ],
)
async def test_an_altered_file_counts_as_missing(tmp_path: Path, altered: str) -> None:
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path)
    trials.observe(finished("chat.1"))
    await saved(trials)
    (path,) = (tmp_path / "trials").iterdir()
    path.write_text(altered)
    assert observed(fleet_of(tmp_path, SHARED), tmp_path).of("chat").requests == 0  # type: ignore[union-attr]  # it has one


async def test_a_figure_that_is_none_is_refused(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path)
    trials.observe(finished("chat.1"))
    await saved(trials)
    (path,) = (tmp_path / "trials").iterdir()
    content = json.loads(path.read_text())
    content["trial"]["conversations"] = [[["x"], [], False]]
    path.write_text(json.dumps(content))
    assert observed(fleet_of(tmp_path, SHARED), tmp_path).of("chat").requests == 0  # type: ignore[union-attr]  # it has one


def test_a_request_that_one_side_failed_and_the_other_answered_is_an_error(tmp_path: Path) -> None:
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path)
    fields = {"model": "chat", "request": "req_1", "phase": "request", "error": "it crashed"}
    failed = Event("upstream.failed", datetime.now(tz=UTC), {**fields, "instance": "chat.1"})
    trials.observe(failed)
    trials.observe(finished("chat.0"))
    trials.observe(failed)
    trials.observe(finished("chat.1", status=502))
    trials.observe(finished("chat.0"))
    trial = trials.of("chat")
    assert trial
    sides = trial.figures.sides
    assert [(sides[name].errors, sides[name].requests) for name in SIDES] == [(0, 2), (2, 2)]


async def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    for number in range(70):
        files.put(tmp_path / "trials", f"{number:032}", {})
    trials = observed(fleet_of(tmp_path, SHARED), tmp_path)
    trials.observe(finished("chat.0"))
    await saved(trials)
    assert len(list((tmp_path / "trials").iterdir())) == 64
