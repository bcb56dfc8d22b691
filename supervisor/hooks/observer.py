"""From the daemon's events to those that hooks know. Does no I/O.

A model is loaded while one of its instances has become ready and its process has not ended.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

from supervisor.events import Event
from supervisor.hooks.hook_event import HookCause, HookEvent
from supervisor.instance.states import STATES, State
from supervisor.process.exit_cause import FailureCause

# What ends a run that is not followed by another one at once.
_ENDED: Final = frozenset({state for state, info in STATES.items() if not info.process})
_STOPPED: Final = HookCause("stopped", "a command or changed settings stopped it")
_RESTARTED: Final = HookCause("restarted", "it starts again")
_NODE_STOPS: Final = HookCause("draining", "it is stopping")


class HookObserver:
    """Which models are loaded and which nodes are down; `cause_of` tells an instance's failure."""

    def __init__(self, cause_of: Callable[[str], FailureCause | None]) -> None:
        self._cause_of = cause_of
        self._up: dict[str, set[str]] = {}
        self._down_nodes: set[str] = set()
        self._reasons: dict[str, HookCause] = {}
        self._stopping: HookCause | None = None

    @property
    def loaded(self) -> frozenset[str]:
        return frozenset(self._up)

    def observe(self, event: Event) -> HookEvent | None:
        """Note an event; return what hooks are to be told."""
        fields = event.fields
        match event.name:
            case "instance.state_changed":
                instance, model = str(fields["instance"]), str(fields["model"])
                return self._changed(event.at, model, instance, State(str(fields["after"])))
            case "instance.failed":
                return _given_up(event)
            case "model.unloaded":
                model, reason = str(fields["model"]), str(fields["reason"])
                self._reasons[model] = HookCause("unloaded", reason)
            case "daemon.stopping":
                self._stopping = HookCause("daemon_stops", f"the daemon stops: {fields['reason']}")
            case "node.down" | "node.draining" | "node.up":
                return self._node(event, str(fields["node"]))
        return None

    def _changed(self, at: datetime, model: str, instance: str, now: State) -> HookEvent | None:
        if now is State.READY:
            return self._ready(at, model, instance)
        if now is State.BACKOFF:
            self._ended(model, instance)
            return self._failed(at, model, instance)
        if now in _ENDED or now is State.STARTING:
            return self._unloaded(at, model, instance, now)
        return None

    def _ready(self, at: datetime, model: str, instance: str) -> HookEvent | None:
        is_first = model not in self._up
        self._up.setdefault(model, set()).add(instance)
        self._reasons.pop(model, None)
        return HookEvent("model_loaded", at, model, instance) if is_first else None

    def _failed(self, at: datetime, model: str, instance: str) -> HookEvent:
        found = self._cause_of(instance)
        cause = HookCause(found.code, found.sentence, found.hint) if found else None
        return HookEvent("model_failed", at, model, instance, cause=cause, restarts=True)

    def _unloaded(self, at: datetime, model: str, instance: str, now: State) -> HookEvent | None:
        if not self._ended(model, instance) or now is State.FAILED:
            return None
        reason = self._reasons.pop(model, self._stopping or _STOPPED)
        cause = _RESTARTED if now is State.STARTING else reason
        return HookEvent("model_unloaded", at, model, instance, cause=cause)

    def _ended(self, model: str, instance: str) -> bool:
        """Note the end of an instance's process; return whether the model is not loaded since."""
        instances = self._up.get(model, set())
        instances.discard(instance)
        return not instances and self._up.pop(model, None) is not None

    def _node(self, event: Event, node: str) -> HookEvent | None:
        was_down = node in self._down_nodes
        if event.name == "node.up":
            self._down_nodes.discard(node)
            return HookEvent("node_up", event.at, node=node) if was_down else None
        self._down_nodes.add(node)
        reason = event.fields.get("reason")
        cause = HookCause("unreachable", str(reason)) if reason else _NODE_STOPS
        return None if was_down else HookEvent("node_down", event.at, node=node, cause=cause)


def _given_up(event: Event) -> HookEvent:
    fields = {key: str(value) for key, value in event.fields.items() if value is not None}
    cause = HookCause(fields["code"], fields["reason"], fields.get("hint"), fields.get("log"))
    model, instance = fields["model"], fields["instance"]
    return HookEvent("model_failed", event.at, model, instance, cause=cause, restarts=False)
