"""Loads and unloads models for clients of the proxy (proxy.model_control.control.ModelControl)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from proxy.errors import Unavailable, UnknownModel
from supervisor.admission.controller import AdmissionController
from supervisor.errors import NoSuchModel
from supervisor.events import LOAD_PROGRESS, Event, EventStream
from supervisor.fleet.availability import availability
from supervisor.fleet.fleet import Fleet
from supervisor.proxy_adapter.model_loader import failure
from supervisor.proxy_adapter.redact import without_directories

_RETRY_AFTER_S: Final = 60
# After these, the state of a model or its load progress may be another.
_CHANGES: Final = frozenset(
    {
        LOAD_PROGRESS,
        *("instance.state_changed", "instance.failed"),
        *("model.load_refused", "model.unloaded", "settings.reloaded", "node.up", "node.down"),
    }
)


class ModelControlAdapter:
    def __init__(self, fleet: Fleet, admission: AdmissionController, events: EventStream) -> None:
        self._fleet = fleet
        self._admission = admission
        self._emit = events.emit
        self._listening: set[asyncio.Event] = set()
        events.add_sink(self._observe)

    def load(self, model: str) -> None:
        """Begin to load a model.

        Raises:
            ModelFailed: It was stopped by command.
            UnknownModel: It is no longer configured.
        """
        found = self._fleet.models.get(model)
        if found and not found.is_open:
            raise failure(found, f"it is stopped (corral start {model})")
        self._command("load", model)

    async def load_for_others(self, model: str) -> None:
        """Begin to load a model for another machine.

        Raises:
            ModelFailed: It was stopped or failed.
            Unavailable: Something in use had to go for it.
            UnknownModel: It is no longer configured.
        """
        found = self._fleet.models.get(model)
        if found is None or not found.is_configured:
            raise UnknownModel(model, list(self._fleet.models))
        state, reason = availability(found)
        if state == "failed":
            raise failure(found, reason)
        if state == "unloaded":
            reason = await self._admission.load_for_others(model)
        if reason:
            shown = without_directories(reason)
            raise Unavailable(f"{model} is not loaded here: {shown}", _RETRY_AFTER_S)

    def unload(self, model: str) -> None:
        """Begin to unload a model; raises UnknownModel."""
        self._command("unload", model)
        self._emit("model.unloaded", model=model, reason="a client asked for it")

    @contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """Yield what is set after each change of a model's state or of its load progress."""
        changed = asyncio.Event()
        self._listening.add(changed)
        try:
            yield changed
        finally:
            self._listening.discard(changed)

    def _command(self, verb: str, model: str) -> None:
        try:
            self._admission.command(verb, [model])
        except NoSuchModel as error:  # a reload has removed it
            raise UnknownModel(model, list(self._fleet.models)) from error

    def _observe(self, event: Event) -> None:
        if event.name in _CHANGES:
            for one in self._listening:
                one.set()
