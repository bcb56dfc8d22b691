"""An engine that runs out of memory while it loads."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, fake_launch, launch_of

from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import State
from supervisor.errors import DeviceMemoryShort
from supervisor.settings.tables import RestartPolicy

UP = frozenset({State.READY})
ENDED = frozenset({State.BACKOFF, State.FAILED})
ONCE = RestartPolicy(backoff_initial_s=1e-6, backoff_max_s=1e-6, max_failures=1)
FULL = "echo 'ggml_vulkan: Device memory allocation failed: ErrorOutOfDeviceMemory' >&2; exit 1"


async def test_it_starts_again_at_once_while_less_can_be_tried(runtime: Path) -> None:
    seen: list[FailureCause] = []

    def reduce(cause: FailureCause) -> bool:
        seen.append(cause)
        if len(seen) == 2:
            harness.launch = fake_launch(runtime)
        return True

    full = launch_of("/bin/sh", "-c", FULL, runtime=runtime)
    harness = InstanceHarness(full, policy=ONCE, reduce=reduce)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP | ENDED)
    assert [entry.code for entry in seen] == ["device_memory"] * 2
    assert (facts.state, facts.run, facts.failures, facts.cause) == (State.READY, 3, 0, None)
    assert not {"backoff", "failed"}.intersection(harness.story)


async def test_where_nothing_is_left_to_give_up_it_fails_as_any_other(runtime: Path) -> None:
    full = launch_of("/bin/sh", "-c", FULL, runtime=runtime)
    harness = InstanceHarness(full, policy=ONCE, reduce=lambda _: False)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(ENDED)
    assert facts.state is State.FAILED
    assert facts.cause
    assert facts.cause.code == "device_memory"


async def test_memory_that_others_hold_is_waited_for_without_limit(runtime: Path) -> None:
    asked = 0

    async def prepare() -> None:
        nonlocal asked
        asked += 1
        if asked < 20:
            raise DeviceMemoryShort("chat does not fit now")

    harness = InstanceHarness(fake_launch(runtime), policy=ONCE, prepare=prepare)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(frozenset({State.BACKOFF}))
        facts = await instance.wait(UP)
    assert (asked, facts.cause) == (20, None)
