"""The cost of a batch request's handover is measured when its answer goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.errors import Unfinished
from proxy.router import slots
from proxy.router.lease import Completion, Lease, SlotYielded
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Timings

RESUME_S = 3.0


async def _nothing(*_: object, **__: object) -> tuple[()]:
    return ()


class Batch:
    """A batch request on the only slot, whose answer goes on three seconds after it got it."""

    def __init__(self) -> None:
        self.router = Router(ProxySettings(), clock=lambda: asyncio.get_running_loop().time())
        self.router.admit(replace(upstream("chat.1", slots=1), can_name_slots=True))
        self.yields: list[SlotYielded] = []

    async def run(self) -> None:
        request = replace(ask("long"), priority="batch", may_yield=True)
        while True:
            try:
                async with self.router.lease(request, yielded=[None, *self.yields][-1]) as lease:
                    await self._answer(lease)
            except SlotYielded as error:
                self.yields.append(error)

    async def _answer(self, lease: Lease) -> None:
        await asyncio.sleep(RESUME_S)
        lease.progress.count_token()
        lease.let_yield(lambda: Unfinished("so far", 2, "x", 9))
        await asyncio.Event().wait()

    async def interrupt(self) -> None:
        await asyncio.sleep(1000)  # after so long, any request may yield
        async with self.router.lease(ask("a question", client="other")) as lease:
            answered = Completion(Timings(0, 10, 20.0, 20, 400.0), {"role": "assistant"})
            self.router.finish(lease, answered)


def test_the_cost_of_a_handover_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "get_slots", _nothing)
    monkeypatch.setattr(slots, "refresh_slots", _nothing)
    batches: list[Batch] = []

    async def main() -> None:
        batches.append(batch := Batch())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(batch.run())
            for _ in range(6):
                await batch.interrupt()
            running.cancel()

    run_in_virtual_time(main())
    (batch,) = batches
    queue, yields = batch.router.queues["chat"], batch.yields
    assert queue.handovers == 6 - 1  # the last one does not go on
    assert queue.handovers_s == pytest.approx(5 * RESUME_S, abs=1)
    # Each request is charged the time that its handovers took, not the expected time.
    assert [error.spent_s for error in yields[:2]] == [0, pytest.approx(RESUME_S, abs=0.2)]
    # The expected time of the next handovers follows.
    assert yields[0].cost_s < 0.5
    assert yields[-1].cost_s > 0.6 * RESUME_S
