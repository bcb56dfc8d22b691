"""An instance in the test's own process that answers as the test says, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.upstream.upstream import Upstream

Script = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request as it arrived, and the connection to answer on."""

    line: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def head(self, *fields: str, status: str = "200 OK") -> None:
        await self.send("\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode())

    async def begin_stream(self) -> None:
        await self.head("Content-Type: text/event-stream", "Transfer-Encoding: chunked")

    async def chunk(self, content: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(content), content))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def drop(self) -> None:
        """Break the connection as a process does that is killed."""
        self.writer.transport.abort()

    async def until_left(self) -> None:
        """Wait until the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


async def say_ok(call: Call) -> None:
    await call.head("Content-Type: application/json", "Content-Length: 11")
    await call.send(b'{"ok":true}')


class Fake:
    """Listens on a unix socket; each connection is one call, played by `script`.

    Asked by the proxy itself how many slots are in use, it tells the truth: as many as there are
    calls whose caller is still there. That is no call.
    """

    def __init__(self, name: str, socket: Path, script: Script) -> None:
        self.name = name
        self.script = script
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self._socket = socket
        self._tasks: set[asyncio.Task[None]] = set()
        self.says_slots = True
        self._playing: list[Call] = []

    def upstream(self, model: str = "chat", slots: int = 2) -> Upstream:
        return Upstream(self.name, model, slots, str(self._socket), "", 0, api_key="inner")

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The connection of a call that is over is no fault; neither is the end of the test.
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            await self._answer(await _read_call(reader, writer))
        writer.close()

    async def _answer(self, call: Call) -> None:
        if self.says_slots and call.line == "GET /slots HTTP/1.1":
            await self._say_slots(call)
            return
        self.calls.put_nowait(call)
        self._playing.append(call)
        try:
            await self.script(call)
        finally:
            self._playing.remove(call)

    async def _say_slots(self, call: Call) -> None:
        busy = sum(not playing.reader.at_eof() for playing in self._playing)
        slots = json.dumps([{"is_processing": True}] * busy).encode()
        await call.head("Content-Type: application/json", f"Content-Length: {len(slots)}")
        await call.send(slots)


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *fields = head.decode(errors="surrogateescape").split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields if field)
    body = await reader.readexactly(int(headers.get("Content-Length", 0)))
    return Call(line, headers, body, reader, writer)
