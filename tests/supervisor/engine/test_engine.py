"""The real engine, through an instance: it behaves as the fake does."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from support import tiny_gguf
from support.corral_cli import PATIENCE_S
from support.instance_harness import InstanceHarness, descriptors, launch_of, loading

from supervisor.engine.client import EngineClient
from supervisor.engine.launch import Launch
from supervisor.engine.run import ProcessRun
from supervisor.engine.state_tasks import wait_healthy
from supervisor.engine.states import InstanceSnapshot, State

UP = frozenset({State.READY})
DOWN = frozenset({State.STOPPED})
SMALL = ("--ctx-size", "256", "--parallel", "1", "--threads", "1", "--offline")

LaunchOf = Callable[..., Launch]


@pytest.fixture
def real(
    engine_path: Path, engine_library_dirs: tuple[Path, ...], tiny_model: Path, runtime: Path
) -> LaunchOf:
    """Return a function that makes a launch of the real engine, with more arguments."""

    def launch(*argv: str, model: Path = tiny_model, port: int | None = None) -> Launch:
        words = (str(engine_path), "--model", str(model), *SMALL, *argv)
        return launch_of(*words, runtime=runtime, port=port, library_dirs=engine_library_dirs)

    return launch


async def failure(launch: Launch) -> InstanceSnapshot:
    """Return the facts of a start that must fail for good."""
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        return await instance.wait(frozenset({State.FAILED}))


async def test_it_starts_serves_and_leaves_when_asked(real: LaunchOf) -> None:
    harness = InstanceHarness(real())
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        async with EngineClient(facts.endpoint, facts.api_key) as client:
            assert await client.is_ours()
        assert (facts.load_progress, facts.warnings) == (1, ())
        instance.stop()
        await instance.wait(DOWN)
    exits = [fields for name, fields in harness.events if name == "instance.exited"]
    assert [(ended["code"], ended["signal"]) for ended in exits] == [(0, None)]


async def test_over_tcp_it_takes_any_port(real: LaunchOf) -> None:
    harness = InstanceHarness(real(port=0))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
    assert facts.endpoint.port > 0


async def test_a_quantised_model_runs_on_this_processor(real: LaunchOf, smollm2: Path) -> None:
    harness = InstanceHarness(real(model=smollm2))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    assert harness.story[:3] == ["starting", "warming", "ready"]


def test_it_is_kept_as_well_on_uvloop(real: LaunchOf) -> None:
    harness = InstanceHarness(real())

    async def live() -> None:
        async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
            instance.start()
            await instance.wait(UP)
            instance.stop()
            await instance.wait(DOWN)

    uvloop.run(live())
    assert harness.story[-2:] == ["stopping", "stopped"]


async def test_ready_is_known_as_soon_as_the_engine_is(real: LaunchOf) -> None:
    """Seed 002: ready as soon as the engine is: it says so, and no probe comes in time."""
    run = ProcessRun(1, real(), clock=time.monotonic, on_progress=lambda _: None)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        process = group.create_task(run.run())
        await wait_healthy(run, first_probe_s=10 * PATIENCE_S)
        process.cancel()


async def test_an_engine_for_embeddings_has_nothing_to_warm(real: LaunchOf) -> None:
    harness = InstanceHarness(real("--embeddings", "--pooling", "mean"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    assert harness.story[:3] == ["starting", "warming", "ready"]


async def test_it_is_back_after_it_was_killed(real: LaunchOf) -> None:
    harness = InstanceHarness(real())
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGKILL)
        waiting = await instance.wait(frozenset({State.BACKOFF}))
        assert waiting.cause
        assert waiting.cause.code == "killed"
        assert (await instance.wait(UP)).run == 2


async def test_stopping_while_it_loads_ends_it_at_once(real: LaunchOf, tmp_path: Path) -> None:
    model = tiny_gguf.make(tmp_path / "larger.gguf", embd=512, layers=8, heads=8, ff=2048)
    harness = InstanceHarness(real(model=model))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await loading(instance)
        instance.stop()
        await instance.wait(DOWN)
    assert "ready" not in harness.story


async def test_a_missing_model_is_a_cause(real: LaunchOf, tmp_path: Path) -> None:
    """Seed 002: a missing model."""
    facts = await failure(real(model=tmp_path / "none.gguf"))
    assert facts.cause
    assert facts.cause.code == "model_missing"
    assert str(tmp_path / "none.gguf") in facts.cause.sentence


async def test_a_truncated_model_is_a_cause(
    real: LaunchOf, tiny_model: Path, tmp_path: Path
) -> None:
    whole = tiny_model.read_bytes()
    for size_bytes in (len(whole) * 3 // 4, 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size_bytes])
        facts = await failure(real(model=tmp_path / "cut.gguf"))
        assert facts.cause
        assert facts.cause.code == "model_truncated"


async def test_a_text_file_is_no_model(real: LaunchOf, tmp_path: Path) -> None:
    """Seed 002: a file of another format."""
    (tmp_path / "text.gguf").write_text("hello, I am text\n" * 100)
    facts = await failure(real(model=tmp_path / "text.gguf"))
    assert facts.cause
    assert facts.cause.code == "model_not_gguf"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--frobnicate",), "flag_unknown"),
        (("--draft-max", "8"), "flag_removed"),
        (("--ctx-size", "many"), "value_invalid"),
        (("--flash-attn", "maybe"), "value_invalid"),
        (("--slot-save-path", "/nowhere/at/all"), "path_denied"),
        (("--device", "CUDA7"), "device_unknown"),
    ],
)
async def test_a_wrong_flag_is_a_cause(real: LaunchOf, argv: tuple[str, ...], code: str) -> None:
    facts = await failure(real(*argv))
    assert facts.cause
    assert facts.cause.code == code


async def test_a_port_in_use_is_a_cause(real: LaunchOf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = await failure(real(port=port))
    assert facts.cause
    assert facts.cause.code == "port_in_use"
    assert str(port) in facts.cause.sentence


async def test_a_socket_left_behind_is_in_nobodys_way(real: LaunchOf, runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime / "chat.0.sock"))
    harness = InstanceHarness(real())
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)


async def test_ten_restarts_leave_descriptors_flat(real: LaunchOf) -> None:
    harness = InstanceHarness(real())
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        before = descriptors()
        for _ in range(10):
            instance.restart()
            await instance.wait(frozenset({State.STARTING}))
            await instance.wait(UP)
        assert descriptors() == before
