"""Turns the daemon's events into events for hooks, and has the user's commands run for them.

A model is loaded from the time when one of its instances is ready until no ready instance's process
runs any more. `HookObserver` and `IdleTimes` do no I/O.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import WITHOUT_PROCESS, State
from supervisor.events import Emit, Event, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.reload import Reload
from supervisor.service import hook_commands
from supervisor.service.hook_commands import HookCause, HookEvent
from supervisor.settings.tables import HookName

# The subject None stands for the whole daemon, a name for a model.
DAEMON = None
Subject = str | None


class IdleTimes:
    """When each subject was last active, since the daemon's start; reports each idle one once."""

    def __init__(self, now_s: float) -> None:
        self._active_at_s: dict[Subject, float] = {DAEMON: now_s}
        self._reported: set[Subject] = set()

    def touch(self, subject: Subject, now_s: float) -> bool:
        """Note a request's end or a load; return whether the subject had been reported as idle."""
        self._active_at_s[subject] = now_s
        was_reported = subject in self._reported
        self._reported.discard(subject)
        return was_reported

    def forget(self, model: str) -> None:
        self._active_at_s.pop(model, None)
        self._reported.discard(model)

    def take_due(
        self, limits_s: Mapping[bool, float], busy: Collection[Subject], now_s: float
    ) -> list[tuple[Subject, float]]:
        """Return the subjects that are idle since the last call, and for how long.

        `limits_s` has a model's limit (False) and the daemon's (True), infinite for never. `busy`
        are the subjects with a request in flight.
        """
        for subject in busy:
            if subject in self._active_at_s:
                self.touch(subject, now_s)
        due = [
            (subject, now_s - at_s)
            for subject, at_s in self._active_at_s.items()
            if subject not in self._reported and now_s - at_s >= limits_s[subject is DAEMON]
        ]
        self._reported.update(subject for subject, _ in due)
        return due

    def next_at_s(self, limits_s: Mapping[bool, float]) -> float:
        """Return when the next subject can be due; infinite for never."""
        return min(
            (
                at_s + limits_s[subject is DAEMON]
                for subject, at_s in self._active_at_s.items()
                if subject not in self._reported
            ),
            default=math.inf,
        )


# States without a process, unless the next run begins at once.
_STOPPED: Final = HookCause("stopped", "a command or changed settings stopped it")
_RESTARTED: Final = HookCause("restarted", "it starts again")
_NODE_STOPS: Final = HookCause("draining", "it is stopping")


class HookObserver:
    """Tracks loaded models and nodes that are down; `cause_of` returns an instance's failure."""

    def __init__(self, cause_of: Callable[[str], FailureCause | None]) -> None:
        self._cause_of = cause_of
        self._up: dict[str, set[str]] = {}
        self._down_nodes: set[str] = set()
        self._reasons: dict[str, HookCause] = {}
        self._stopping: HookCause | None = None

    @property
    def loaded_models(self) -> frozenset[str]:
        return frozenset(self._up)

    def observe(self, event: Event) -> HookEvent | None:
        """Note an event; return the event for hooks, or None."""
        fields = event.fields
        match event.name:
            case "instance.state_changed":
                instance, model = str(fields["instance"]), str(fields["model"])
                return self._change_event(event.at, model, instance, State(str(fields["after"])))
            case "instance.failed":
                return _give_up_event(event)
            case "model.unloaded":
                model, reason = str(fields["model"]), str(fields["reason"])
                self._reasons[model] = HookCause("unloaded", reason)
            case "daemon.stopping":
                self._stopping = HookCause("daemon_stops", f"the daemon stops: {fields['reason']}")
            case "node.down" | "node.draining" | "node.up":
                return self._node_event(event, str(fields["node"]))
        return None

    def _change_event(
        self, at: datetime, model: str, instance: str, now: State
    ) -> HookEvent | None:
        if now is State.READY:
            is_first = model not in self._up
            self._up.setdefault(model, set()).add(instance)
            self._reasons.pop(model, None)
            return HookEvent("model_loaded", at, model, instance) if is_first else None
        if now is State.BACKOFF:
            self._note_end(model, instance)
            found = self._cause_of(instance)
            cause = HookCause(found.code, found.sentence, found.hint) if found else None
            return HookEvent("model_failed", at, model, instance, cause=cause, restarts=True)
        if now in WITHOUT_PROCESS or now is State.STARTING:
            return self._unload_event(at, model, instance, now)
        return None

    def _unload_event(
        self, at: datetime, model: str, instance: str, now: State
    ) -> HookEvent | None:
        if not self._note_end(model, instance) or now is State.FAILED:
            return None
        reason = self._reasons.pop(model, self._stopping or _STOPPED)
        cause = _RESTARTED if now is State.STARTING else reason
        return HookEvent("model_unloaded", at, model, instance, cause=cause)

    def _note_end(self, model: str, instance: str) -> bool:
        """Note the end of an instance's process; return whether this unloaded the model."""
        instances = self._up.get(model, set())
        instances.discard(instance)
        return not instances and self._up.pop(model, None) is not None

    def _node_event(self, event: Event, node: str) -> HookEvent | None:
        was_down = node in self._down_nodes
        if event.name == "node.up":
            self._down_nodes.discard(node)
            return HookEvent("node_up", event.at, node=node) if was_down else None
        self._down_nodes.add(node)
        reason = event.fields.get("reason")
        cause = HookCause("unreachable", str(reason)) if reason else _NODE_STOPS
        return None if was_down else HookEvent("node_down", event.at, node=node, cause=cause)


def _give_up_event(event: Event) -> HookEvent:
    fields = {key: str(value) for key, value in event.fields.items() if value is not None}
    cause = HookCause(fields["code"], fields["reason"], fields.get("hint"), fields.get("log"))
    model, instance = fields["model"], fields["instance"]
    return HookEvent("model_failed", event.at, model, instance, cause=cause, restarts=False)


class Hooks(Part):
    """Has commands run; `busy_models` returns the models with requests in flight."""

    task = "hooks"

    def __init__(
        self,
        reload: Reload,
        fleet: Fleet,
        busy_models: Callable[[], Collection[str]],
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reload = reload
        self._busy_models = busy_models
        self._clock = clock
        self._observer = HookObserver(fleet.cause_of)
        self.runner = hook_commands.HookRunner(emit)
        self._idle_times = IdleTimes(clock())
        self._woken = asyncio.Event()

    def observe(self, event: Event) -> None:
        if event.name == "request.finished":
            self._touch(str(event.fields["model"]))
        elif event.name == "settings.reloaded":
            self._woken.set()
        elif found := self._observer.observe(event):
            if found.event == "model_loaded" and found.model:
                self._idle_times.touch(found.model, self._clock())
                self._woken.set()
            elif found.model and found.model not in self._observer.loaded_models:
                self._idle_times.forget(found.model)
            self._submit(found)

    async def serve(self) -> None:
        """Run commands and watch for idleness until cancelled, which kills running commands."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.runner.serve())
            while True:
                pause_s = self._report_idle()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                self._woken.clear()

    def _touch(self, model: str) -> None:
        now_s, is_loaded = self._clock(), model in self._observer.loaded_models
        was_idle = self._idle_times.touch(DAEMON, now_s)
        if is_loaded and self._idle_times.touch(model, now_s):
            was_idle = True
        if was_idle:
            self._woken.set()

    def _report_idle(self) -> float | None:
        """Report idle subjects; return the seconds until the next can be due, None for never."""
        settings, now_s = self._reload.settings.hooks, self._clock()
        limits_s = {
            False: settings.model_idle_s if settings.model_idle else math.inf,
            True: settings.daemon_idle_s if settings.daemon_idle else math.inf,
        }
        if min(limits_s.values()) == math.inf:
            return None
        busy: set[Subject] = set(self._busy_models())
        busy |= {DAEMON} if busy else set()
        for subject, idle_s in self._idle_times.take_due(limits_s, busy, now_s):
            hook: HookName = "daemon_idle" if subject is DAEMON else "model_idle"
            at = datetime.now(tz=UTC)
            self._submit(HookEvent(hook, at, subject, idle_s=round(idle_s, 3)))
        next_at_s = self._idle_times.next_at_s(limits_s)
        return None if next_at_s == math.inf else max(0.0, next_at_s - now_s)

    def _submit(self, event: HookEvent) -> None:
        settings = self._reload.settings.hooks
        if commands := settings.commands(event.event):
            directory = hook_commands.hook_directory(self._reload.loaded.path)
            self.runner.submit(
                hook_commands.HookJob(event, commands, settings.timeout_s, directory)
            )
