"""Reloads on a fleet of fake engines, with failures that a real engine does not show at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.reload_harness import BETTER, BROKEN, GOOD, GREEDY, ReloadHarness, settings

from proxy.nodes.settings import NodeSettings
from supervisor.engine.states import State
from supervisor.errors import CorralError, DaemonBusy, SettingsInvalid
from supervisor.fleet.reload import ReloadResult
from supervisor.fleet.replace import ReplicaFailure
from supervisor.settings.schema import Settings


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ReloadHarness]:
    harness = ReloadHarness(tmp_path)
    async with harness.open():
        yield harness


async def test_with_room_the_successor_serves_before_the_old_instance_drains(
    harness: ReloadHarness,
) -> None:
    harness.traffic.may_drain.clear()
    done = await harness.reload(*BETTER)
    assert not done.failures
    assert harness.names() == ["chat.0~2", "chat.0"]
    assert harness.traffic.admitted == {"chat.0~2"}
    changes = [
        (fields["instance"], fields["after"])
        for name, fields in harness.events
        if name == "instance.state_changed"
    ]
    assert changes.index(("chat.0~2", "ready")) < changes.index(("chat.0", "draining"))
    old = harness.fleet.replica("chat.0")
    harness.traffic.may_drain.set()
    assert old.life
    await asyncio.wait([old.life])
    assert old.instance.snapshot().state is State.STOPPED


async def test_without_room_the_instance_drains_and_starts_again(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    done = await harness.reload(*BETTER)
    assert not done.failures
    assert harness.names() == ["chat.0"]
    after_ready = harness.story("chat.0")[3:]
    assert after_ready == ["draining", "stopping", "starting", "warming", "ready"]
    replica = harness.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == BETTER


async def test_a_failed_restart_returns_to_the_old_settings(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    done = await harness.reload(*BROKEN)
    (failure,) = done.failures
    assert failure.stays
    await harness.until_ready("chat.0")
    replica = harness.fleet.replica("chat.0")
    assert replica.fingerprint
    assert replica.fingerprint.args == GOOD
    assert harness.fleet.models["chat"].entry.args == GOOD


async def test_a_successor_without_memory_is_started_in_place(harness: ReloadHarness) -> None:
    done = await harness.reload(*GREEDY)
    assert not done.failures
    assert harness.story("chat.0~2") == ["starting", "backoff", "stopped"]
    assert harness.names() == ["chat.0"]
    assert harness.traffic.admitted == {"chat.0"}


async def test_beside_or_not_at_all(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    story = harness.story("chat.0")
    assert await harness.replace_beside(*BETTER) is False
    assert harness.names() == ["chat.0"]
    assert harness.story("chat.0") == story
    harness.available_bytes = 1 << 50
    assert await harness.replace_beside(*BETTER) is True
    assert harness.traffic.admitted == {"chat.0~2"}


@pytest.mark.parametrize("argv", [BROKEN, GREEDY], ids=["broken", "short of memory"])
async def test_a_successor_that_fails_beside_an_instance_changes_nothing(
    harness: ReloadHarness, argv: tuple[str, ...]
) -> None:
    before = harness.fleet.replica("chat.0").planner
    failure = await harness.replace_beside(*argv)
    assert isinstance(failure, ReplicaFailure)
    assert failure.stays
    assert harness.traffic.admitted == {"chat.0"}
    assert harness.fleet.replica("chat.0").planner is before
    assert harness.story("chat.0")[-1] == "ready"


async def test_a_model_stopped_while_it_is_replaced_beside_stays_down(
    harness: ReloadHarness,
) -> None:
    before = harness.fleet.replica("chat.0").planner
    async with asyncio.TaskGroup() as group:
        with harness.stream.listen() as listener:
            replacing = group.create_task(harness.replace_beside(*GOOD, "--fault", "silent-load"))
            while (await listener.next()).fields.get("instance") != "chat.0~2":
                pass
        harness.fleet.command("stop")
    assert replacing.result() is False
    await harness.fleet.all_down()
    assert harness.fleet.replica("chat.0").planner is before


async def test_a_reload_waits_for_another_change_of_running_models(harness: ReloadHarness) -> None:
    async with harness.replacer.lock:
        reloading = harness.triggers.start(dry_run=True)
        done, _ = await asyncio.wait([reloading], timeout=0.05)
        assert not done
    assert isinstance(await reloading, ReloadResult)


async def test_the_first_failure_ends_the_changes_of_a_model(harness: ReloadHarness) -> None:
    harness.settings = settings(GOOD, replicas=2)
    await harness.triggers.start(dry_run=False)
    harness.settings = settings(BROKEN, replicas=2)
    done = await harness.triggers.start(dry_run=False)
    assert isinstance(done, ReloadResult)
    assert [str(failure.place) for failure in done.failures] == ["chat.0"]
    assert harness.story("chat.1~2") == []
    assert harness.traffic.admitted == {"chat.0", "chat.1"}


async def test_a_model_stopped_while_its_successor_loads_stays_down(harness: ReloadHarness) -> None:
    reloading = await harness.begin_endless_reload()
    is_over = harness.fleet.command("stop")
    done = await reloading
    assert isinstance(done, ReloadResult)
    assert not done.failures
    await harness.fleet.all_down()
    assert is_over()
    assert harness.traffic.admitted == set()


async def test_a_second_command_is_rejected_and_signals_are_merged(harness: ReloadHarness) -> None:
    harness.available_bytes = 0
    harness.traffic.may_drain.clear()
    harness.settings = settings(BETTER)
    reloading = harness.triggers.start(dry_run=False)
    await harness.traffic.drains.wait()
    with pytest.raises(DaemonBusy, match="already running"):
        harness.triggers.start(dry_run=True)
    for _ in range(3):
        harness.triggers.schedule()
    changed: list[object] = []
    with harness.stream.listen() as listener:
        harness.traffic.may_drain.set()
        while len(changed) < 2:
            event = await listener.next()
            changed += [event.fields["changed"]] if event.name == "settings.reloaded" else []
    assert changed == [["chat.0"], []]
    assert reloading.done()
    assert isinstance(await harness.triggers.start(dry_run=True), ReloadResult)
    assert sum(name == "settings.reloaded" for name, _ in harness.events) == 2


async def test_a_reload_stops_with_the_daemon(harness: ReloadHarness) -> None:
    reloading = await harness.begin_endless_reload()
    harness.reloads.cancel()
    await asyncio.wait([reloading])
    assert reloading.cancelled()
    with pytest.raises(DaemonBusy, match="is stopping"):
        harness.triggers.start(dry_run=False)
    harness.fleet.command("stop")
    await harness.fleet.all_down()
    assert all(replica.instance.snapshot().pid is None for replica in harness.fleet.all_replicas())


async def test_a_planning_error_changes_nothing(harness: ReloadHarness) -> None:
    harness.settings = settings(())
    events_before = len(harness.events)
    refusal = await harness.triggers.start(dry_run=False)
    assert isinstance(refusal, CorralError)
    assert harness.events[events_before:] == [
        ("settings.rejected", {"reason": "it has no program"})
    ]


async def test_a_new_model_starts_unless_it_is_to_be_loaded_on_demand(
    harness: ReloadHarness,
) -> None:
    models = settings(GOOD).models
    harness.settings = Settings(
        models={
            **models,
            "now": models["chat"],
            "later": models["chat"].model_copy(update={"preload": False}),
        }
    )
    done = await harness.triggers.start(dry_run=False)
    assert isinstance(done, ReloadResult)
    assert list(map(str, done.difference.added)) == ["now.0", "later.0"]
    assert harness.story("now.0")[-1] == "ready"
    assert harness.story("later.0") == []
    assert harness.fleet.models["later"].is_open


async def test_an_error_of_a_node_rejects_the_whole_reload(harness: ReloadHarness) -> None:
    def with_node(name: str) -> Settings:
        return harness.settings.model_copy(update={"nodes": {name: NodeSettings(url="http://far")}})

    harness.settings = with_node("wrong")
    outcome = await harness.triggers.start(dry_run=False)
    assert isinstance(outcome, SettingsInvalid)
    assert harness.nodes == []
    harness.settings = with_node("far")
    for dry_run in (True, False):
        assert isinstance(await harness.triggers.start(dry_run=dry_run), ReloadResult)
    assert harness.nodes == [["far"]]
