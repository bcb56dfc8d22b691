"""Runs a `corral` command for the daemon.

What commands need, such as a client of the hub, would stay in the daemon's memory.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson

from supervisor.errors import CorralError, from_json

_LINE_MAX_BYTES: Final = 1024**2
# After SIGINT a download writes what came.
_END_S: Final = 5.0


async def lines(words: Sequence[str]) -> AsyncGenerator[dict[str, Any], None]:
    """Run a command, and yield the JSON objects that it prints, one a line.

    It is interrupted when the iteration ends.

    Raises:
        CorralError: It could not be started, or printed something else.
    """
    process = await _start(words)
    assert process.stdout  # noqa: S101 (a pipe was asked for)
    try:
        async for line in process.stdout:
            yield _read(line)
        await process.wait()
    finally:
        await _end(process)


async def envelope(words: Sequence[str]) -> dict[str, Any]:
    """Run a command with --json, and return its envelope; interrupted when cancelled.

    Raises:
        CorralError: The command's own, or as `lines`.
    """
    process = await _start([*words, "--json"])
    assert process.stdout  # noqa: S101 (as above)
    try:
        found = _read(await process.stdout.read())
        await process.wait()
    finally:
        await _end(process)
    if found.get("error"):
        raise from_json(found["error"])
    return found


async def _start(words: Sequence[str]) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "supervisor.cli", *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=_LINE_MAX_BYTES,
        )
    except OSError as error:
        raise CorralError(f"cannot start a command: {error.strerror}") from error


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorralError("the command printed something unexpected")
    return found


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
