"""Leaves the devices to other programs for a time, by `corral yield`.

The models that use a device are stopped as by `corral stop`: running answers end, conversations are
saved. When the time is over, those that were loaded are loaded again, and requests load the others
again. A model that a command starts meanwhile stays, and is not stopped again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from attrs import define, field

from supervisor.events import Emit, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, phase_of, snapshots_of
from supervisor.loading.controller import AdmissionController
from supervisor.loading.memory_usage import MemoryUsage

_REFUSAL: Final = "its devices are left to other programs (corral yield --end ends that)"


@define(eq=False, slots=False)
class DeviceYield(Part):
    task = "device yield"
    serves_until = "drain"

    _fleet: Fleet
    _admission: AdmissionController
    _memory_usage: MemoryUsage
    _emit: Emit
    _clock: Callable[[], float] = time.monotonic
    _ends_at_s: float | None = field(default=None, init=False)  # infinite without a limit
    _was_loaded: dict[str, bool] = field(factory=dict, init=False)  # by stopped model
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)

    @property
    def models(self) -> list[str]:
        """The models that are stopped for it."""
        return [name for name in self._was_loaded if self._stopped(name)]

    @property
    def left_s(self) -> float | None:
        """Time until it ends, infinite without a limit; None if devices are not yielded."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._clock())

    def begin(self, duration_s: float) -> Callable[[], bool]:
        """Yield all devices for this time from now on; return whether all models have stopped."""
        self._ends_at_s = self._clock() + duration_s
        self._changed.set()
        using = [
            model
            for model in self._fleet.models.values()
            if model.is_configured and model.is_open and self._memory_usage.take_devices([model])
        ]
        names = [model.entry.name for model in using]
        for model in using:
            phase = phase_of(model, snapshots_of(model))
            self._was_loaded[model.entry.name] = phase in {"loading", "loaded"}
        self._emit("devices.yielded", models=" ".join(names))
        # Without a name it would stop all.
        is_over = self._admission.command("stop", names) if names else lambda: True
        for model in using:
            model.refusal = _REFUSAL
        return is_over

    def end(self) -> Callable[[], bool]:
        """Load the models again that were loaded; return whether that is over."""
        self._ends_at_s = None
        stopped, self._was_loaded = self._was_loaded, {}
        models = {name: model for name in stopped if (model := self._stopped(name))}
        for model in models.values():
            model.is_open, model.refusal = True, None
        loaded = [name for name in models if stopped[name]]
        self._emit("devices.taken_back", models=" ".join(loaded))
        return self._admission.command("load", loaded) if loaded else lambda: True

    def _stopped(self, name: str) -> Model | None:
        """Return a model if nothing but this keeps it from being loaded."""
        model = self._fleet.models.get(name)
        return model if model and not model.is_open and model.refusal == _REFUSAL else None

    async def serve(self) -> None:
        while True:
            self._changed.clear()
            left_s = self.left_s
            if left_s == 0:
                self.end()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left_s == math.inf else left_s):
                    await self._changed.wait()
