"""Reads a log for people: its last lines, and then each new one, across rotation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.process.lines import LINE_MAX_BYTES, LineSplitter

_BLOCK_BYTES: Final = 64 * 1024
_LOOK_BACK_BYTES: Final = 4 * 1024**2


def tail(path: Path, count: int) -> tuple[str, ...]:
    """Return up to `count` last lines of a file, oldest first; none if it does not exist.

    Looks back at most 4 MiB. Lines are cut after LINE_MAX_BYTES.
    """
    try:
        with path.open("rb") as file:
            _seek_back(file, count)
            data = file.read(_LOOK_BACK_BYTES)
    except FileNotFoundError:
        return ()
    return tuple(_text(line) for line in data.removesuffix(b"\n").split(b"\n")) if data else ()


async def follow(
    path: Path, count: int = 0, *, interval_s: float = 0.1
) -> AsyncGenerator[str, None]:
    """Yield up to `count` last lines of `path`, then each that is written, without end.

    Looks every `interval_s`. A file that was set aside is read to its end before the new one is
    begun, and a file that does not exist yet is waited for.
    """
    file = await _appear(path, interval_s)
    try:
        _seek_back(file, count)
        lines = LineSplitter()
        while True:
            replaced = _is_replaced(file, path)
            while block := file.read(_BLOCK_BYTES):
                for line in lines.feed(block):
                    yield _text(line)
            if replaced:
                file.close()
                file = await _appear(path, interval_s)
            else:
                await asyncio.sleep(interval_s)
    finally:
        file.close()


def _seek_back(file: BinaryIO, count: int) -> None:
    """Go to where the last `count` lines begin, looking back no further than _LOOK_BACK_BYTES."""
    end = file.seek(0, os.SEEK_END)
    start, data = end, b""
    while start > 0 and data.count(b"\n") <= count and end - start < _LOOK_BACK_BYTES:
        step = min(_BLOCK_BYTES, start)
        start -= step
        file.seek(start)
        data = file.read(step) + data
    lines = data.removesuffix(b"\n").split(b"\n")
    before = lines[: max(0, len(lines) - count)]
    file.seek(min(end, start + sum(len(line) + 1 for line in before)))


async def _appear(path: Path, interval_s: float) -> BinaryIO:
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            await asyncio.sleep(interval_s)


def _is_replaced(file: BinaryIO, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return True
    return there.st_ino != os.fstat(file.fileno()).st_ino


def _text(line: bytes) -> str:
    return line[:LINE_MAX_BYTES].rstrip(b"\r").decode(errors="replace")
