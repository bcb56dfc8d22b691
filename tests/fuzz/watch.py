"""Watches a daemon from another process: its event loop, its memory, a stream beside it.

Prints one JSON object a line: {"kind": "loop" | "memory" | "stream", "from_s", "to_s", "value", …}.
Times are monotonic, a clock that all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import Any, Final

from fuzz.gap import Gap

_PROBE_S: Final = 0.1
_MEMORY_S: Final = 0.05
_STREAM_TOKENS: Final = 400
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz"
_PATIENCE_S: Final = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("host", "port", "pid", "key"):
        parser.add_argument(name)
    words = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_watch((words.host, int(words.port)), int(words.pid), words.key))


async def _watch(address: tuple[str, int], pid: int, key: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_probe(address, pid))
        tasks.create_task(_memory(pid))
        tasks.create_task(_streams(address, pid, key))


def _tell(kind: str, began_s: float, value: float, **more: Any) -> None:
    now_s = time.monotonic()
    print(
        json.dumps({"kind": kind, "from_s": began_s, "to_s": now_s, "value": value, **more}),
        flush=True,
    )


def _report(kind: str, gap: Gap, **more: Any) -> None:
    wall_s, own_s = gap.lengths_s()
    _tell(kind, gap.began_s, own_s, wall_s=wall_s, **more)
    gap.restart()


async def _probe(address: tuple[str, int], pid: int) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address)
            while True:
                gap = Gap(pid)
                writer.write(request)
                async with asyncio.timeout(_PATIENCE_S):
                    await _skip_answer(reader)
                _report("loop", gap)
                await asyncio.sleep(_PROBE_S)
        await asyncio.sleep(_PROBE_S)


async def _skip_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    await reader.readexactly(int(length or 0))


async def _memory(pid: int) -> None:
    peak = 0
    while True:
        began_s = time.monotonic()
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        if pages > peak + 256:
            peak = pages
            _tell("memory", began_s, pages / 256)
        await asyncio.sleep(_MEMORY_S)


async def _streams(address: tuple[str, int], pid: int, key: str) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _stream(address, pid, key)
        await asyncio.sleep(0.2)


async def _stream(address: tuple[str, int], pid: int, key: str) -> None:
    members = {"model": "m", "stream": True, "max_tokens": _STREAM_TOKENS, "temperature": 0}
    body = json.dumps({**members, "messages": [{"role": "user", "content": "hello"}]}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head.encode() + body)
    try:
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        _tell("answer", time.monotonic(), status)
        if status == 200:
            await _follow(reader, pid)
    finally:
        writer.close()


async def _follow(reader: asyncio.StreamReader, pid: int) -> None:
    """Read a stream to its end; it counts from its first text."""
    gap, last = Gap(pid, engines=True), ""
    async for line in reader:
        if line.strip() == b"data: [DONE]":
            return
        if reason := _error(line):
            _report("stream", gap)
            _tell("broken", gap.began_s, 0, reason=reason)
            return
        if not (text := _text(line)):
            continue
        if last:
            _report("stream", gap)
        gap.restart()
        if wrong := _disorder(last + text):
            _tell("wrong", gap.began_s, 0, reason=wrong)
        last = text[-1]
    _tell("broken", gap.began_s, 0, reason="the stream ended without [DONE]")


def _event(line: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line[6:]) if line.startswith(b"data: {") else {}
    return event


def _error(line: bytes) -> str:
    error = _event(line).get("error")
    return str(error.get("message"))[:200] if error else ""


def _text(line: bytes) -> str:
    choices = _event(line).get("choices")
    return (choices[0]["delta"].get("content") or "") if choices else ""


def _disorder(text: str) -> str:
    """Return where a letter does not follow the one before: the model repeats the alphabet."""
    for before, after in itertools.pairwise(text):
        if after != _ALPHABET[(_ALPHABET.find(before) + 1) % 26]:
            return f"{after!r} follows {before!r}"
    return ""


if __name__ == "__main__":
    main()
