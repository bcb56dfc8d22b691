"""2 000 connections without a key, to a daemon that may open 1 024 files, beside one with a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fuzz.client import send
from fuzz.daemon import Daemon
from fuzz.finding import Findings, Report
from fuzz.observer import Observer
from fuzz.request import NEIGHBOUR_KEY, Input, post

FILES_MAX: Final = 1024
COUNT: Final = 2000
_HOLD_S: Final = 6.0
_ANSWERED_S: Final = 5.0
# The bytes that each kind of idle client has sent.
_BEGINNINGS: Final = {
    "silent": b"",
    "half a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "half a body": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
}


@dataclass
class Connections:
    """One daemon with few files, and more clients than it has files.

    Attributes:
        daemon: The daemon, not yet started; it may open few files.
        count: How many idle clients.
    """

    daemon: Daemon
    count: int
    findings: Findings
    _answers: Counter[str] = field(default_factory=Counter)
    _slowest_s: float = 0

    async def run(self) -> Report:
        """Try each kind of idle client: half a minute, whatever the limits are."""
        _raise_own_limit(self.count)
        self.daemon.start()
        observer = Observer(self.daemon, self._found, self.daemon.address)
        async with asyncio.TaskGroup() as tasks:
            observing = tasks.create_task(observer.run())
            for kind, beginning in _BEGINNINGS.items():
                await self._crowd(kind, beginning, observer)
            observing.cancel()
        observer.read_log()
        if code := self.daemon.stop():
            self._found(f"it ended with code {code}", "", time.monotonic())
        figures = {
            "answers to the client": ", ".join(f"{k}: {n}" for k, n in self._answers.items()),
            "slowest answer": f"{self._slowest_s:.2f} s",
            **observer.figures(),
        }
        return Report("connections", len(_BEGINNINGS), figures)

    async def _crowd(self, kind: str, beginning: bytes, observer: Observer) -> None:
        """Connect all idle clients; meanwhile send requests with a key."""
        crowd: list[asyncio.StreamWriter] = []
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask(kind, observer))
            await self._connect(crowd, beginning, observer)
            await asyncio.sleep(_HOLD_S)
            _leave(crowd)
            await asyncio.sleep(1)
            asking.cancel()

    async def _connect(
        self, crowd: list[asyncio.StreamWriter], beginning: bytes, observer: Observer
    ) -> None:
        for _ in range(self.count):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*observer.address)
                writer.write(beginning)
                crowd.append(writer)

    async def _ask(self, kind: str, observer: Observer) -> None:
        """Send requests on new connections; every response must arrive soon."""
        body = json.dumps({"model": "embed", "content": "hello"}).encode()
        own = (f"Authorization: Bearer {NEIGHBOUR_KEY}",)
        asked = Input("asking", (post("/tokenize", body, own),))
        while True:
            began_s = time.monotonic()
            answer = await send(observer.address, asked)
            took_s = time.monotonic() - began_s
            self._slowest_s = max(self._slowest_s, took_s)
            self._answers[str(answer.status or answer.ending)] += 1
            if answer.status != 200 or took_s > _ANSWERED_S:
                what = f"{kind}: a client with a key gets {answer.status} ({answer.ending})"
                self._found(what, f"after {took_s:.1f} s: {answer.body[:200]!r}", began_s)
            await asyncio.sleep(0.1)

    def _found(self, what: str, detail: str, _from_s: float) -> None:
        self.findings.add("connections", what, detail)


def _leave(crowd: Sequence[asyncio.StreamWriter]) -> None:
    for writer in crowd:
        writer.transport.abort()


def _raise_own_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 500), hard))
