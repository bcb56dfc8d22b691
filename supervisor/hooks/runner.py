"""Runs the commands of hooks beside the daemon's work: some at a time, the others queued."""

from __future__ import annotations

import asyncio

from proxy.failures import FAILURES
from supervisor.events import Emit
from supervisor.hooks.command import HookRun, hook_command, run_command
from supervisor.hooks.job_queue import HookJob, JobQueue


class HookRunner:
    """Runs jobs while it is served; one that fails or is dropped is a warning."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._queue = JobQueue()
        self._has_warned = False
        self._group: asyncio.TaskGroup | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    async def serve(self) -> None:
        """Run jobs until cancelled, which kills those that run."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._begin()
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def submit(self, job: HookJob) -> None:
        if self._queue.add(job):
            self._empty.clear()
            self._begin()
        elif not self._has_warned:
            self._has_warned = True
            self._emit("hooks.dropped", hook=job.event.event, count=self._queue.take_dropped())

    async def finish(self) -> None:
        """Wait until nothing runs or is queued; the caller has a deadline, and then kills."""
        try:
            await self._empty.wait()
        finally:
            self._report_unfinished()

    def _begin(self) -> None:
        while self._group and (job := self._queue.begin()):
            self._group.create_task(self._run(job), name=f"hook {job.event.event}")
        if self._queue.is_empty:
            self._empty.set()
            self._report_dropped()

    def _report_dropped(self) -> None:
        if count := self._queue.take_dropped():
            self._emit("hooks.dropped", hook=None, count=count)
        self._has_warned = False

    def _report_unfinished(self) -> None:
        self._queue.drop_waiting()
        self._report_dropped()
        for job in self._queue.running:
            ran = HookRun("it was killed, because the daemon stopped", "", None)
            self._report(job, job.commands[0], ran)

    async def _run(self, job: HookJob) -> None:
        try:
            for words in job.commands:
                command = hook_command(words, job.event, job.cwd)
                ran = await run_command(command, job.event.as_json(), job.timeout_s)
                self._report(job, words, ran)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("hooks", error)
        finally:
            self._queue.end(job)
            self._begin()

    def _report(self, job: HookJob, words: tuple[str, ...], ran: HookRun) -> None:
        fields = {
            "hook": job.event.event,
            "model": job.event.model,
            "node": job.event.node,
            "command": words[0],
            "duration_s": ran.duration_s,
            "output": ran.output or None,
        }
        if ran.problem:
            self._emit("hook.failed", **fields, reason=ran.problem)
        else:
            self._emit("hook.finished", **fields)
