"""The display of `corral top` in a terminal, whose daemon answers late."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import sys
import threading
from typing import cast

import pytest
from support.corral_cli import PATIENCE_S
from support.top_samples import STATUS

from proxy.observe.past import RequestStats
from supervisor.cli import top
from supervisor.cli.top_view import Sample
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import DaemonStatus


class LateDaemon:
    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answers = threading.Semaphore(0)

    def status(self) -> DaemonStatus:
        self.asked.release()
        self.answers.acquire(timeout=PATIENCE_S)
        return STATUS

    def requests(self) -> list[RequestStats]:
        return []

    async def until_asked(self) -> None:
        assert await asyncio.to_thread(self.asked.acquire, timeout=PATIENCE_S)


async def test_an_answer_after_the_end_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    daemon = LateDaemon()
    with os.fdopen(ours, "rb", 0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        display = top._Display(cast("Client", daemon), 0.001, has_colour=False)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(display.run(Sample(STATUS)))
            await daemon.until_asked()
            os.write(screen.fileno(), b"q")
            assert await running == 0
        daemon.answers.release()
        await daemon.until_asked()  # it asks again after it has taken the answer
        written = b""
        while select.select([screen], [], [], 0)[0]:
            written += os.read(screen.fileno(), 65_536)
        assert written.endswith(b"\x1b[?25h\x1b[?1049l")
        asyncio.get_running_loop().remove_reader(terminal.fileno())
    daemon.answers.release(2)
