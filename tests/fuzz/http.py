"""Attacks a daemon over HTTP with many clients at once, and checks each response."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fuzz.attacks import attack
from fuzz.bodies import MODELS
from fuzz.client import Answer, send
from fuzz.daemon import Daemon
from fuzz.finding import Example, Findings, Limits, Report
from fuzz.observer import DEATHS_MAX, Observer
from fuzz.request import NEIGHBOUR_KEY, Input, post
from fuzz.verdict import wrong

_CLIENTS: Final = 8
_REMEMBERED: Final = 400
# An input that ended at most so long before a fault may have caused it.
_BEFORE_S: Final = 1.0


@dataclass
class Sent:
    """An input that was sent, and its result."""

    number: int
    what: Input
    began_s: float
    ended_s: float = float("inf")
    ending: str = "under way"

    def example(self) -> Example:
        timing = f"began {self.began_s:.2f}, ended {self.ended_s:.2f}, {self.ending}"
        return Example(f"{self.number}.http", self.what.data, f"{self.what.how}; {timing}")


@dataclass
class Http:
    """One daemon, not yet started, and its clients."""

    daemon: Daemon
    seed: int
    limits: Limits
    findings: Findings
    statuses: Counter[str] = field(default_factory=Counter)
    _sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    async def run(self) -> Report:
        self.daemon.start()
        observer = Observer(self.daemon, self._found, self.daemon.address)
        async with asyncio.TaskGroup() as tasks:
            observing = tasks.create_task(observer.run())
            async with asyncio.TaskGroup() as clients:
                for _ in range(_CLIENTS):
                    clients.create_task(self._client(observer))
            await self._check_end(observer)
            observing.cancel()
        observer.read_log()
        if code := self.daemon.stop():
            self._found(f"it ended with code {code}", "", time.monotonic())
        observer.read_log()
        answers = ", ".join(f"{key}: {count}" for key, count in self.statuses.most_common())
        return Report("http", self.limits.taken, {"answers": answers, **observer.figures()})

    async def _client(self, observer: Observer) -> None:
        while (number := self.limits.take()) is not None and observer.deaths < DEATHS_MAX:
            what = await asyncio.to_thread(attack, self.seed, number)
            await observer.up.wait()
            sent = Sent(number, what, time.monotonic())
            self._sent.append(sent)
            answer = await send(observer.address, what)
            sent.ended_s, sent.ending = time.monotonic(), f"{answer.status} {answer.ending}"
            self._judge(sent, answer)

    def _judge(self, sent: Sent, answer: Answer) -> None:
        self.statuses[str(answer.status or answer.ending)] += 1
        took = f"input {sent.number}, {sent.ended_s - sent.began_s:.2f} s"
        for what in wrong(sent.what, answer):
            detail = answer.body[:600].decode("utf-8", "replace")
            self.findings.add("http", what, f"{took}: {detail}", [sent.example()])

    def _found(self, what: str, detail: str, from_s: float) -> None:
        self.findings.add("http", what, detail, list(self._suspects(from_s)))

    def _suspects(self, from_s: float) -> Iterator[Example]:
        for sent in reversed(self._sent):
            if sent.ended_s > from_s - _BEFORE_S:
                yield sent.example()

    async def _check_end(self, observer: Observer) -> None:
        await observer.up.wait()
        if busy := await asyncio.to_thread(self.daemon.settle):
            self._found("slots stay busy after all clients left", busy, time.monotonic())
        for model in sorted({"m", "later", "alias"} & set(MODELS)):
            members = {"model": model, "prompt": "a", "n_predict": 2}
            own = (f"Authorization: Bearer {NEIGHBOUR_KEY}",)
            asked = Input("last", (post("/completion", json.dumps(members).encode(), own),))
            answer = await send(observer.address, asked)
            if answer.status != 200:
                detail = f"{answer.status} {answer.body[:300]!r}"
                self._found(f"{model} does not answer at the end", detail, time.monotonic())
