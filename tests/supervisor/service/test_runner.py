"""How many commands run at a time, in which order, and the fate of the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from support.corral_cli import until

from supervisor.events import Event, EventStream
from supervisor.service.hook_commands import HookEvent, HookJob, HookRunner

AT = datetime(2026, 11, 22, tzinfo=UTC)


def job(model: str, *commands: tuple[str, ...], cwd: Path = Path("/")) -> HookJob:
    return HookJob(HookEvent("model_loaded", AT, model), commands, 30, cwd)


class Running:
    def __init__(self) -> None:
        self.emitted: list[Event] = []
        self.runner = HookRunner(EventStream(self.emitted.append).emit)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.runner.serve())
            await asyncio.sleep(0)
            yield
            task.cancel()

    def told(self) -> list[tuple[str, object]]:
        return [
            (event.name, event.fields.get("reason") or event.fields.get("count"))
            for event in self.emitted
        ]


async def test_all_commands_of_an_event_run_in_order(tmp_path: Path) -> None:
    running = Running()
    async with running.serving():
        commands = [("sh", "-c", f"{what} >> out") for what in ("echo 1", "false", "echo 2")]
        running.runner.submit(job("a", *commands, cwd=tmp_path))
        await running.runner.finish()
    assert (tmp_path / "out").read_text() == "1\n2\n"
    assert running.told() == [
        ("hook.finished", None),
        ("hook.failed", "it exited with code 1"),
        ("hook.finished", None),
    ]


async def test_jobs_for_one_model_wait_for_each_other_and_others_do_not(tmp_path: Path) -> None:
    running = Running()
    os.mkfifo(tmp_path / "gate")
    async with running.serving():
        for model, command in {"a": "cat gate", "a ": "touch a", "b": "touch b"}.items():
            running.runner.submit(job(model.strip(), ("sh", "-c", command), cwd=tmp_path))
        await asyncio.to_thread(until, (tmp_path / "b").exists)
        assert not (tmp_path / "a").exists()
        await asyncio.to_thread((tmp_path / "gate").write_text, "")
        await running.runner.finish()
    assert (tmp_path / "a").exists()


async def test_a_fifth_job_waits_for_a_place(tmp_path: Path) -> None:
    running = Running()
    os.mkfifo(tmp_path / "gate")
    async with running.serving():
        for number in range(5):
            command = f"touch {number}; cat gate"
            running.runner.submit(job(str(number), ("sh", "-c", command), cwd=tmp_path))
        await asyncio.to_thread(until, lambda: len(list(tmp_path.glob("?"))) == 4)
        assert not (tmp_path / "4").exists()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await running.runner.finish()
    assert [name for name, _ in running.told()] == ["hooks.dropped", *["hook.failed"] * 4]


async def test_what_is_dropped_is_one_warning_and_a_count() -> None:
    running = Running()
    for number in range(70):
        running.runner.submit(job(str(number)))
    assert running.told() == [("hooks.dropped", 1)]
    async with running.serving():
        await running.runner.finish()
    assert running.told() == [("hooks.dropped", 1), ("hooks.dropped", 5)]


async def test_a_daemon_that_stops_waits_a_little_and_names_the_killed_commands() -> None:
    running = Running()
    async with running.serving():
        running.runner.submit(job("a", ("sleep", "600")))
        running.runner.submit(job("a", ("true",)))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await running.runner.finish()
    assert running.told() == [
        ("hooks.dropped", 1),
        ("hook.failed", "it was killed, because the daemon stopped"),
    ]
