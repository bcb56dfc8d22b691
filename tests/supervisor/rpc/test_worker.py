"""One supervised worker, the real program."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.corral_cli import PATIENCE_S
from support.instance_harness import PATIENT, is_gone

from supervisor.builds.discover import Device, Engine
from supervisor.errors import WorkerUnreachable
from supervisor.events import EventStream
from supervisor.rpc.address import WorkerAddress, free_port, probe
from supervisor.rpc.worker import Worker, WorkerOptions, worker_launch
from supervisor.system.paths import Directories


class Served:
    def __init__(
        self,
        engine: Engine,
        home: Path,
        device: str | None = None,
        ask: Callable[[], tuple[Device, ...]] | None = None,
    ) -> None:
        self.ends = 0
        self.address = WorkerAddress("a", "127.0.0.1", free_port())
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        options = WorkerOptions("127.0.0.1", self.address.port, threads=1, device=device)
        self.worker = Worker(
            self.address,
            lambda: worker_launch(engine, "a", options, Directories(*[home] * 5))[0],
            ask or functools.partial(probe, engine, self.address, 0.5),
            PATIENT,
            EventStream(lambda event: self.events.append((event.name, event.fields))).emit,
            self._note_end,
        )

    def _note_end(self) -> None:
        self.ends += 1

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Worker]:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            task = group.create_task(self.worker.serve())
            yield self.worker
            task.cancel()

    def emitted(self, name: str) -> list[Mapping[str, Any]]:
        return [fields for event, fields in self.events if event == name]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 (another process brings it about)
            await asyncio.sleep(0.01)


async def test_a_worker_serves_and_ends_with_its_supervisor(engine: Engine, tmp_path: Path) -> None:
    served = Served(engine, tmp_path)
    async with served.up() as worker:
        await worker.wait_settled()
        assert worker.state == "ready"
        pid = worker.pid
        assert pid
        assert sum(device.total_mib for device in worker.devices) > 0
        await served.until(lambda: not worker.is_used)  # once it has seen our question end
    assert is_gone(pid)
    (ready,) = served.emitted("worker.ready")
    assert ready["address"] == str(served.address)


async def test_a_killed_worker_comes_back_at_the_same_address(
    engine: Engine, tmp_path: Path
) -> None:
    served = Served(engine, tmp_path)
    async with served.up() as worker:
        await worker.wait_settled()
        first = worker.pid
        assert first
        os.kill(first, signal.SIGKILL)
        await served.until(lambda: len(served.emitted("worker.ready")) == 2)
        assert (worker.state, worker.restarts) == ("ready", 1)
        assert worker.pid != first
    (ended,) = served.emitted("worker.exited")
    assert ended["signal"] == signal.SIGKILL
    assert "SIGKILL" in ended["reason"]


async def test_a_worker_that_an_engine_uses_is_ready_although_our_question_waits(
    engine: Engine, tmp_path: Path
) -> None:
    is_over = threading.Event()

    def wait() -> tuple[Device, ...]:
        is_over.wait(60)
        raise WorkerUnreachable("another engine uses it")

    served = Served(engine, tmp_path, ask=wait)
    try:
        async with served.up() as worker:
            await served.until(lambda: _is_connected(served.address))
            await served.until(lambda: worker.state == "ready")
            pid = worker.pid
            assert pid
            os.kill(pid, signal.SIGKILL)
            await served.until(lambda: served.ends)  # the engine is told that its worker has ended
            is_over.set()
    finally:
        is_over.set()


def _is_connected(address: WorkerAddress) -> bool:
    """Connect as an engine does, and leave."""
    try:
        socket.create_connection((address.host, address.port)).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_a_client_that_leaves_before_its_answer_does_not_kill_it(
    engine: Engine, tmp_path: Path
) -> None:
    served = Served(engine, tmp_path)
    async with served.up() as worker:
        await worker.wait_settled()
        pid = worker.pid
        hello = bytes([14]) + (24).to_bytes(8, "little") + bytes(24)
        where = ("127.0.0.1", served.address.port)
        for _ in range(3):
            with socket.create_connection(where):
                await served.until(lambda: worker.is_used)
                with socket.create_connection(where) as early:
                    early.sendall(hello)
            await served.until(lambda: not worker.is_used)
        assert worker.pid == pid
        assert not served.emitted("worker.exited")


async def test_a_device_that_is_not_there_fails_for_good(engine: Engine, tmp_path: Path) -> None:
    served = Served(engine, tmp_path, device="nope")
    async with served.up() as worker:
        await worker.wait_settled()
    assert worker.state == "failed"
    assert worker.cause
    assert worker.cause.sentence == "there is no device nope here"
    (failed,) = served.emitted("worker.failed")
    assert failed["log"]


async def test_a_taken_port_is_tried_again(engine: Engine, tmp_path: Path) -> None:
    served = Served(engine, tmp_path)
    with socket.create_server(("127.0.0.1", served.address.port)):
        async with served.up() as worker:
            await worker.wait_settled()
            assert worker.state in {"backoff", "starting"}
            assert worker.cause
            assert f"cannot listen on {served.address}" in worker.cause.sentence
    async with served.up() as worker:
        await served.until(lambda: worker.state == "ready")
