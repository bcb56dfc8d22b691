"""Observes the daemon under attack: its log, its process, and the reports of `watch`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fuzz.daemon import Daemon
from fuzz.request import NEIGHBOUR_KEY

LOOP_S: Final = 1.0
STREAM_S: Final = 2.0
MEMORY_MIB: Final = 400.0
DEATHS_MAX: Final = 20
# The model whose file is mutated while the daemon runs.
FUZZED: Final = "fuzzed"

_LIMITS: Final[Mapping[str, tuple[float, str]]] = {
    "loop": (LOOP_S, f"the event loop was blocked for over {LOOP_S:g} s"),
    "stream": (STREAM_S, f"a running stream had a gap of over {STREAM_S:g} s"),
    "memory": (MEMORY_MIB, f"the daemon takes over {MEMORY_MIB:g} MiB"),
    "broken": (-1, "another client's stream broke"),
    "wrong": (-1, "another client's stream is wrong"),
}
_LOOK_S: Final = 0.25
_TESTS: Final = Path(__file__).parent.parent

Found = Callable[[str, str, float], None]
"""Receives a finding, its details, and its monotonic start time."""


@dataclass
class Observer:
    """Watches a running daemon until cancelled, and restarts it when it dies.

    Attributes:
        found: Receives the findings.
        address: Where the daemon listens; changes with each restart.
        worst: The largest measurement of each kind.
        deaths: How often it died.
        up: Set while the daemon runs.
    """

    daemon: Daemon
    found: Found
    address: tuple[str, int] = ("", 0)
    worst: dict[str, float] = field(default_factory=dict)
    deaths: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Watch; returns after too many deaths."""
        while self.deaths < DEATHS_MAX:
            self.address = await asyncio.to_thread(lambda: self.daemon.address)
            self.up.set()
            watch = await self._watch()
            try:
                async with asyncio.TaskGroup() as tasks:
                    hearing = tasks.create_task(self._hear(watch))
                    await self._follow()
                    hearing.cancel()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    watch.kill()
                await watch.wait()
            self.up.clear()
            self.deaths += 1
            code = self.daemon.exit_code()
            self.found("the daemon died", f"exit code {code}", time.monotonic() - 2)
            await asyncio.to_thread(self.daemon.restart)
        self.up.set()

    async def _watch(self) -> asyncio.subprocess.Process:
        words = (*map(str, self.address), str(self.daemon.pid), NEIGHBOUR_KEY)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fuzz.watch", *words),
            env={**os.environ, "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}"},
            stdout=asyncio.subprocess.PIPE,
        )

    async def _hear(self, watch: asyncio.subprocess.Process) -> None:
        assert watch.stdout
        async for line in watch.stdout:
            message = json.loads(line)
            kind, value = message["kind"], message["value"]
            self.worst[kind] = max(self.worst.get(kind, 0), value)
            wall_s = message.get("wall_s", 0)
            self.worst[f"{kind} wall"] = max(self.worst.get(f"{kind} wall", 0), wall_s)
            limit, what = _LIMITS.get(kind, (float("inf"), ""))
            if value > limit:
                self.found(what, json.dumps(message), message["from_s"])

    async def _follow(self) -> None:
        while self.daemon.is_alive():
            await asyncio.sleep(_LOOK_S)
            self.read_log()

    def figures(self) -> dict[str, str]:
        worst = {kind: self.worst.get(kind, 0) for kind in _LIMITS}
        walls = {kind: self.worst.get(f"{kind} wall", 0) for kind in _LIMITS}
        return {
            "longest blocked loop": f"{worst['loop']:.2f} s ({walls['loop']:.2f} s on the wall)",
            "longest gap in a stream": f"{worst['stream']:.2f} s ({walls['stream']:.2f} s)",
            "most memory": f"{worst['memory']:.0f} MiB",
            "deaths of the daemon": str(self.deaths),
        }

    def read_log(self) -> None:
        for news in self.daemon.news():
            if isinstance(news, dict) and news.get("model") == FUZZED:
                continue  # it is no fault that an engine does not load an invalid file
            for what in wrong(news):
                self.found(what, str(news), time.monotonic())


def wrong(news: Mapping[str, Any] | str) -> list[str]:
    if isinstance(news, str):
        last = news.rstrip().rpartition("\n")[2][:90]
        is_traceback = "Traceback (most recent call last)" in news
        return [f"a {'traceback' if is_traceback else 'text'} in the daemon's log: {last}"]
    match news.get("event"):
        case "instance.exited" if news.get("fault"):
            return [f"an engine crashed, signal {news.get('signal')}"]
        case "instance.failed":
            return ["a model failed"]
        case "task.failed":
            return [f"a failure inside, {news.get('task')}: {news.get('error')}"[:120]]
        case "request.rejected" if news.get("status") == 500:
            return [f"internal error: {news.get('reason')}"]
    return ["a traceback in an event"] if "Traceback (most" in json.dumps(news) else []
