"""An instance that waits for an RPC worker, or loses one."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, fake_launch, launch_of

from supervisor.engine.states import State
from supervisor.errors import WorkerMismatch, WorkerUnreachable
from supervisor.settings.tables import RestartPolicy

UP = frozenset({State.READY})
ENDED = frozenset({State.BACKOFF, State.FAILED})
ONCE = RestartPolicy(backoff_initial_s=1e-6, backoff_max_s=1e-6, max_failures=1)
ABORT = "echo 'Remote RPC server crashed or returned malformed response' >&2; kill -ABRT $$"


class Door:
    """Lets a start pass once it was asked so often."""

    def __init__(self, opens_at: int) -> None:
        self.asked = 0
        self._opens_at = opens_at

    async def ask(self) -> None:
        self.asked += 1
        if self.asked < self._opens_at:
            raise WorkerUnreachable("worker a at 10.0.0.1:1 does not answer")


async def test_seed_000_a_worker_is_waited_for_without_limit(runtime: Path) -> None:
    door = Door(20)
    harness = InstanceHarness(fake_launch(runtime), policy=ONCE, prepare=door.ask)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        waiting = await instance.wait(frozenset({State.BACKOFF}))
        assert waiting.cause
        assert waiting.cause.sentence == "worker a at 10.0.0.1:1 does not answer"
        facts = await instance.wait(UP)
    assert (door.asked, facts.cause) == (20, None)


async def test_seed_000_another_version_of_the_protocol_is_final(runtime: Path) -> None:
    async def refuse() -> None:
        raise WorkerMismatch("worker a speaks RPC protocol 9.0.0")

    harness = InstanceHarness(fake_launch(runtime), prepare=refuse)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(ENDED)
    assert facts.state is State.FAILED
    assert facts.pid is None


async def test_an_instance_that_is_stopped_while_it_prepares_runs_nothing(runtime: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def prepare() -> None:
        begun.set()
        await go_on.wait()

    harness = InstanceHarness(fake_launch(runtime), prepare=prepare)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await begun.wait()
        instance.stop()
        go_on.set()
        facts = await instance.wait(frozenset({State.STOPPED}))
    assert facts.log_path is None
    assert not harness.traffic.ends


async def test_an_error_in_the_preparation_is_a_failure_like_others(runtime: Path) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    harness = InstanceHarness(fake_launch(runtime), policy=ONCE, prepare=fail)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(ENDED)
    assert facts.cause
    assert facts.cause.code == "internal"


async def test_seed_000_a_lost_worker_blames_no_request_and_not_the_engine(runtime: Path) -> None:
    lost = launch_of("/bin/sh", "-c", ABORT, "sh", "--rpc", "10.0.0.1:1", runtime=runtime)
    harness = InstanceHarness(replace(lost, uses_workers=True), policy=ONCE)
    harness.traffic.computed = 1
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(ENDED)
        assert facts.state is State.BACKOFF
        assert facts.cause
        assert facts.cause.code == "rpc_lost"
    assert harness.traffic.ends[0] == "failed"
    assert "RPC worker" in harness.traffic.end_reasons[0]
    exits = [fields for name, fields in harness.events if name == "instance.exited"]
    assert exits[0]["signal"] == signal.SIGABRT


async def test_an_engine_without_workers_cannot_blame_one(runtime: Path) -> None:
    harness = InstanceHarness(launch_of("/bin/sh", "-c", ABORT, runtime=runtime), policy=ONCE)
    harness.traffic.computed = 1
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(ENDED)
    assert facts.cause
    assert facts.cause.code == "crashed_at_request"
    assert harness.traffic.ends[0] == "crashed"
    assert not harness.traffic.end_reasons[0]
