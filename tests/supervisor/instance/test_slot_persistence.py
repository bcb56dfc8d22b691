"""When an instance has its conversations kept, by a keeper that writes down when it is asked."""

import asyncio
import os
import signal
from pathlib import Path

from fakes.instance_harness import InstanceHarness, fake_launch, mark_unhealthy, quick

from proxy.router.instances import Activity
from supervisor.engine_client.client import EngineClient
from supervisor.instance.interfaces import NoSlotPersister
from supervisor.instance.states import State

UP = frozenset({State.READY})
DOWN = frozenset({State.STOPPED})


class Recorder:
    """Writes down what it is asked, and in which state the instance is then."""

    def __init__(self, harness: InstanceHarness) -> None:
        self.calls: list[tuple[str, str]] = []
        self.called = asyncio.Event()
        self._harness = harness
        harness.instance._persister = self

    async def restore(self, _client: EngineClient, run: int, /) -> int:
        self._note("restore", run)
        return 0

    async def save(self, _client: EngineClient, run: int, /) -> None:
        self._note("save", run)

    def _note(self, call: str, run: int) -> None:
        facts = self._harness.instance.snapshot()
        assert facts.run == run
        self.calls.append((call, facts.state.value))
        self.called.set()


async def test_it_is_filled_before_it_serves_and_saved_when_it_is_drained(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        assert keeper.calls == [("restore", "warming")]
        harness.traffic.busy.clear()
        instance.stop()
        await instance.wait(frozenset({State.DRAINING}))
        harness.traffic.busy.set()
        await instance.wait(DOWN)
    assert keeper.calls[1:] == [("save", "draining")]
    assert harness.steps == ["withdrawn 0", "drained", "exit line"]


async def test_one_that_answers_no_conversations_is_not_filled(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "no-completion"))
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        assert keeper.calls == []


async def test_one_that_is_unwell_is_not_asked_to_save(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.1)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSTOP)
        mark_unhealthy(instance, facts.run)
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in keeper.calls] == ["restore"]


async def test_one_in_which_nothing_moves_is_not_asked_to_save(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.1, liveness_interval_s=0.4, idle_probe_s=0)
    harness = InstanceHarness(fake_launch(runtime, "wedged"), limits=limits)
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        harness.traffic.now = Activity(in_flight=2, awaiting_upstream=1)
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in keeper.calls] == ["restore"]


async def test_slots_are_saved_before_a_probe_takes_one(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0.2)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        keeper.called.clear()
        await keeper.called.wait()
        assert keeper.calls[1] == ("save", "ready")
        assert facts.log_path
        assert facts.log_path.read_text().count("POST /completion") == 1


async def test_a_drain_that_takes_too_long_saves_nothing(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime), limits=quick(drain_timeout_s=0.05))
    keeper = Recorder(harness)
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in keeper.calls] == ["restore"]


async def test_who_keeps_nothing_fills_nothing(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(20), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        async with EngineClient(facts.endpoint, facts.api_key) as client:
            assert await NoSlotPersister().restore(client, 1) == 0
