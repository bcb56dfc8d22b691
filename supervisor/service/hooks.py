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

from attrs import define, field

from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import WITHOUT_PROCESS, State
from supervisor.events import Emit, Event, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.reload import Reload
from supervisor.service import hook_commands
from supervisor.service.hook_commands import HookCause, HookEvent
from supervisor.settings.tables import HookName, HookSettings

# The subject None stands for the whole daemon, a name for a model.
DAEMON = None
Subject = str | None


class IdleTimes:
    """When each subject was last active, since the daemon's start; reports each idle one once."""

    def __init__(self, now_s: float) -> None:
        self._active_at_s: dict[Subject, float] = {DAEMON: now_s}
        self._reported: set[Subject] = set()

    def touch(self, subject: Subject, now_s: float) -> None:
        """Note a request's end or a load."""
        self._active_at_s[subject] = now_s
        self._reported.discard(subject)

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


# How often idleness is looked for, if a hook waits for it.
_LOOK_EVERY_S: Final = 1.0
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


@define(eq=False, slots=False)
class Hooks(Part):
    """Has commands run; `busy_models` returns the models with requests in flight."""

    task = "hooks"

    _reload: Reload
    _fleet: Fleet
    _busy_models: Callable[[], Collection[str]]
    _emit: Emit
    _clock: Callable[[], float] = time.monotonic
    _reloaded: asyncio.Event = field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._observer = HookObserver(self._fleet.cause_of)
        self.runner = hook_commands.HookRunner(self._emit)
        self._idle_times = IdleTimes(self._clock())

    def observe(self, event: Event) -> None:
        if event.name == "request.finished":
            model, now_s = str(event.fields["model"]), self._clock()
            self._idle_times.touch(DAEMON, now_s)
            if model in self._observer.loaded_models:
                self._idle_times.touch(model, now_s)
        elif event.name == "settings.reloaded":
            self._reloaded.set()
        elif found := self._observer.observe(event):
            if found.event == "model_loaded" and found.model:
                self._idle_times.touch(found.model, self._clock())
            elif found.model and found.model not in self._observer.loaded_models:
                self._idle_times.forget(found.model)
            self._submit(found)

    async def serve(self) -> None:
        """Run commands and watch for idleness until cancelled, which kills running commands."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.runner.serve())
            while True:
                settings = self._reload.settings.hooks
                is_watching = bool(settings.model_idle or settings.daemon_idle)
                if is_watching:
                    self._report_idle(settings)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S if is_watching else None):
                        await self._reloaded.wait()
                self._reloaded.clear()

    def _report_idle(self, settings: HookSettings) -> None:
        now_s = self._clock()
        limits_s = {
            False: settings.model_idle_s if settings.model_idle else math.inf,
            True: settings.daemon_idle_s if settings.daemon_idle else math.inf,
        }
        busy: set[Subject] = set(self._busy_models())
        busy |= {DAEMON} if busy else set()
        for subject, idle_s in self._idle_times.take_due(limits_s, busy, now_s):
            hook: HookName = "daemon_idle" if subject is DAEMON else "model_idle"
            self._submit(HookEvent(hook, datetime.now(tz=UTC), subject, idle_s=round(idle_s, 3)))

    def _submit(self, event: HookEvent) -> None:
        settings = self._reload.settings.hooks
        if commands := settings.commands(event.event):
            directory = hook_commands.hook_directory(self._reload.loaded.path)
            self.runner.submit(
                hook_commands.HookJob(event, commands, settings.timeout_s, directory)
            )
