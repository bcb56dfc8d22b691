"""One client of the daemon: sends an input and reads the response."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fuzz.request import Input

# A complete request without a response by then hangs.
ANSWER_S: Final = 60.0
_KEPT_BYTES: Final = 4 * 1024**2
_LINE_MAX_BYTES: Final = 1024**2


@dataclass(frozen=True)
class Answer:
    """A response.

    Attributes:
        status: Of the first response that is not 1xx; None where there is none.
        headers: Of that response, names in lower case.
        body: Of that response, at most 4 MiB.
        ending: `complete`, `closed`, `timeout`, `left` or `refused`.
    """

    status: int | None
    headers: Mapping[str, str]
    body: bytes
    ending: str


async def send(address: tuple[str, int], what: Input) -> Answer:
    try:
        reader, writer = await asyncio.open_connection(*address, limit=_LINE_MAX_BYTES)
    except OSError as error:
        return Answer(None, {}, str(error).encode(), "refused")
    try:
        return await _exchange(reader, writer, what)
    finally:
        _close(writer, reset=what.is_reset)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Input
) -> Answer:
    """Send and read at once: an answer may come before the last byte is sent."""
    queue_timeout_s = ANSWER_S if what.leave_after_s is None else what.leave_after_s
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(_write(writer, what))
        reading = tasks.create_task(_answer(reader, is_head=what.is_head))
        both = {writing, reading}
        await asyncio.wait(both, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({reading}, timeout=queue_timeout_s)
        writing.cancel()
        reading.cancel()
    if not reading.cancelled():
        return reading.result()
    return Answer(None, {}, b"", "timeout" if what.leave_after_s is None else "left")


async def _write(writer: asyncio.StreamWriter, what: Input) -> None:
    for piece in what.pieces:
        with contextlib.suppress(OSError):
            writer.write(piece)
            await writer.drain()
        if what.pause_s:
            await asyncio.sleep(what.pause_s)


async def _answer(reader: asyncio.StreamReader, *, is_head: bool) -> Answer:
    status, headers, body = None, dict[str, str](), bytearray()
    try:
        while status is None or 100 <= status < 200:
            status, headers = _parsed(await reader.readuntil(b"\r\n\r\n"))
        ending = "complete" if is_head else await _body(reader, headers, body)
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        ending = "closed"
    return Answer(status, headers, bytes(body), ending)


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    fields = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str], body: bytearray) -> str:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            data = await reader.readexactly(size + 2)
            if len(body) < _KEPT_BYTES:
                body += data[:-2]
    elif "content-length" in headers:
        body += await reader.readexactly(int(headers["content-length"]))
    return "complete"


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        own = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The rest need not be sent any more.
    writer.transport.abort()
