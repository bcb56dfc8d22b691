"""Watches the daemon's events for those that the user has commands for, and has them run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from supervisor.events import Emit, Event
from supervisor.hooks.hook_event import HookEvent
from supervisor.hooks.idle_times import DAEMON, IdleTimes, Subject
from supervisor.hooks.job_queue import HookJob
from supervisor.hooks.observer import HookObserver
from supervisor.hooks.runner import HookRunner
from supervisor.process.exit_cause import FailureCause
from supervisor.settings.hooks import HookName, HookSettings


@dataclass(frozen=True, slots=True)
class HookSources:
    """What hooks ask of the daemon.

    Attributes:
        settings: Those that apply now.
        directory: Where commands run.
        busy_models: The models with requests in flight.
        cause_of: Why an instance ended last.
    """

    settings: Callable[[], HookSettings]
    directory: Callable[[], Path]
    busy_models: Callable[[], Collection[str]]
    cause_of: Callable[[str], FailureCause | None]


class Hooks:
    """`observe` takes each event of the daemon at once; it neither blocks nor fails."""

    def __init__(
        self, sources: HookSources, emit: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._observer = HookObserver(sources.cause_of)
        self._runner = HookRunner(emit)
        self._idle_times = IdleTimes(clock())
        self._woken = asyncio.Event()

    def observe(self, event: Event) -> None:
        if event.name == "request.finished":
            self._touch(str(event.fields["model"]))
        elif event.name == "settings.reloaded":
            self._woken.set()
        elif found := self._observer.observe(event):
            self._follow(found)
            self._submit(found)

    async def serve(self) -> None:
        """Run commands, and watch for idleness, until cancelled; kills what runs then."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._runner.serve())
            while True:
                pause_s = self._report_idle()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                self._woken.clear()

    async def finish(self) -> None:
        """Wait for the commands that run or are queued; the caller has a deadline."""
        await self._runner.finish()

    def _touch(self, model: str) -> None:
        now_s, is_loaded = self._clock(), model in self._observer.loaded
        was_idle = self._idle_times.touch(DAEMON, now_s)
        if is_loaded and self._idle_times.touch(model, now_s):
            was_idle = True
        if was_idle:
            self._woken.set()

    def _follow(self, event: HookEvent) -> None:
        if event.event == "model_loaded" and event.model:
            self._idle_times.touch(event.model, self._clock())
            self._woken.set()
        elif event.model and event.model not in self._observer.loaded:
            self._idle_times.forget(event.model)

    def _report_idle(self) -> float | None:
        """Report what is idle; return the seconds until something else can be, None for never."""
        limits_s, now_s = _limits_s(self._sources.settings()), self._clock()
        if min(limits_s.values()) == math.inf:
            return None
        busy: set[Subject] = set(self._sources.busy_models())
        busy |= {DAEMON} if busy else set()
        for subject, idle_s in self._idle_times.take_due(limits_s, busy, now_s):
            self._submit(_idle_event(subject, idle_s))
        next_at_s = self._idle_times.next_at_s(limits_s)
        return None if next_at_s == math.inf else max(0.0, next_at_s - now_s)

    def _submit(self, event: HookEvent) -> None:
        settings = self._sources.settings()
        if commands := settings.commands(event.event):
            directory = self._sources.directory()
            self._runner.submit(HookJob(event, commands, settings.timeout_s, directory))


def _limits_s(settings: HookSettings) -> Mapping[bool, float]:
    return {
        False: settings.model_idle_s if settings.model_idle else math.inf,
        True: settings.daemon_idle_s if settings.daemon_idle else math.inf,
    }


def _idle_event(model: Subject, idle_s: float) -> HookEvent:
    hook: HookName = "daemon_idle" if model is DAEMON else "model_idle"
    return HookEvent(hook, datetime.now(tz=UTC), model, idle_s=round(idle_s, 3))
