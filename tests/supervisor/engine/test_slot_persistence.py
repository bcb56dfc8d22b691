"""When an instance saves and restores its slots."""

import asyncio
import os
import signal
from pathlib import Path

from support.corral_cli import PATIENCE_S
from support.instance_harness import QUICK, InstanceHarness, fake_launch, quick

from proxy.router.lease import Activity
from supervisor.engine.client import EngineClient
from supervisor.engine.launch import Launch
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.states import State
from supervisor.settings.tables import InstanceLimits

UP = frozenset({State.READY})
DOWN = frozenset({State.STOPPED})


class Recorder:
    """Records each request, and the state of the instance at that time."""

    def __init__(self, launch: Launch, limits: InstanceLimits = QUICK) -> None:
        self.calls: list[tuple[str, str]] = []
        self.called = asyncio.Event()
        self.harness = InstanceHarness(launch, limits=limits, persister=self)

    async def restore(self, _client: EngineClient, run: int, /) -> int:
        self._note("restore", run)
        return 0

    def has_prompt(self, _prompt: WarmPrompt, /) -> bool:
        return False

    async def save(self, _client: EngineClient, run: int, /) -> None:
        self._note("save", run)

    def _note(self, call: str, run: int) -> None:
        facts = self.harness.instance.snapshot()
        assert facts.run == run
        self.calls.append((call, facts.state.value))
        self.called.set()


async def test_slots_are_restored_before_service_and_saved_after_the_drain(runtime: Path) -> None:
    recorder = Recorder(fake_launch(runtime))
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        assert recorder.calls == [("restore", "warming")]
        harness.traffic.busy.clear()
        instance.stop()
        await instance.wait(frozenset({State.DRAINING}))
        harness.traffic.busy.set()
        await instance.wait(DOWN)
    assert recorder.calls[1:] == [("save", "draining")]
    assert harness.steps == ["withdrawn 0", "drained", "exit line"]


async def test_an_engine_without_completions_restores_nothing(runtime: Path) -> None:
    recorder = Recorder(fake_launch(runtime, "no-completion"))
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        assert recorder.calls == []


async def test_an_unhealthy_engine_saves_nothing(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.4, stop_timeout_s=0.1)
    recorder = Recorder(fake_launch(runtime), limits=limits)
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSTOP)
        await instance.wait(frozenset({State.UNHEALTHY}))
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in recorder.calls] == ["restore"]


async def test_slots_are_saved_as_requests_end_while_others_go_on(runtime: Path) -> None:
    recorder = Recorder(fake_launch(runtime))
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        for in_flight in (2, 1, 0):
            recorder.called.clear()
            harness.traffic.now = Activity(in_flight=in_flight)
            instance.stop()
            await recorder.called.wait()
        harness.traffic.busy.set()
        await instance.wait(DOWN)
    assert recorder.calls[1:] == [("save", "draining")] * 3


async def test_of_an_engine_that_hangs_nothing_is_saved_at_the_end(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.1, liveness_interval_s=0.4, idle_probe_s=0)
    recorder = Recorder(fake_launch(runtime, "wedged"), limits=limits)
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        harness.traffic.now = Activity(in_flight=2, awaiting_upstream=1)
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in recorder.calls] == ["restore", "save"]


async def test_slots_are_saved_before_a_probe_overwrites_one(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0.2)
    recorder = Recorder(fake_launch(runtime), limits=limits)
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        recorder.called.clear()
        await recorder.called.wait()
        assert recorder.calls[1] == ("save", "ready")
        assert facts.log_path
        assert facts.log_path.read_text().count("POST /completion") == 1


async def test_a_drain_that_takes_too_long_saves_the_slots_that_were_idle_at_its_start(
    runtime: Path,
) -> None:
    recorder = Recorder(fake_launch(runtime), limits=quick(drain_timeout_s=0.05))
    harness = recorder.harness
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        harness.traffic.now = Activity(in_flight=1)
        instance.stop()
        await instance.wait(DOWN)
    assert [call for call, _ in recorder.calls] == ["restore", "save"]
