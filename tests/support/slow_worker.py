"""A worker, and a worker that answers late after each compute command."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from support.corral_cli import PATIENCE_S, until

from supervisor.builds.discover import Engine
from supervisor.builds.probe import environment
from supervisor.rpc.relay import RequestReader

_CHUNK_BYTES = 65536


@contextmanager
def worker(engine: Engine) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a `ggml-rpc-server` for the length of the block; yield it with its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    words = (engine.path.with_name("ggml-rpc-server"), "-H", "127.0.0.1", "-p", port, "-t", 1)
    process = subprocess.Popen(
        [*map(str, words)],
        env=environment(os.environ, engine.path, engine.library_dirs),
        # A worker of build 10434 dies of SIGPIPE; Python ignores it, and so does its child then.
        restore_signals=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _listens(port))
        yield process, port
    finally:
        process.kill()
        process.wait()


@contextmanager
def slow_worker(engine: Engine, late_s: float) -> Iterator[int]:
    """Run a worker that takes this much longer for each pass."""
    loop, ports = asyncio.new_event_loop(), queue.Queue[int]()
    with worker(engine) as (_, port):
        serving = loop.create_task(_serve(port, late_s, ports.put))
        thread = threading.Thread(target=_run, args=(loop, serving))
        thread.start()
        try:
            yield ports.get(timeout=PATIENCE_S)
        finally:
            loop.call_soon_threadsafe(serving.cancel)
            thread.join(PATIENCE_S)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _run(loop: asyncio.AbstractEventLoop, serving: asyncio.Task[None]) -> None:
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(serving)
    loop.close()


async def _serve(port: int, late_s: float, report: Callable[[int], None]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_worker, to_worker = await asyncio.open_connection("127.0.0.1", port)
        pending: list[int] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(_requests(reader, to_worker, pending))
            group.create_task(_responses(from_worker, writer, pending, late_s))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    report(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


async def _requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pending: list[int]
) -> None:
    requests = RequestReader()
    with suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            pending.append(requests.feed(chunk))
            writer.write(chunk)
    writer.close()


async def _responses(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pending: list[int], late_s: float
) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            count = sum(pending)
            pending.clear()
            await asyncio.sleep(count * late_s)
            writer.write(chunk)
    writer.close()
