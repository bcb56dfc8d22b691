"""Leaves devices to other programs: by `corral yield`, in quiet hours, or if they need memory.

By command, and in quiet hours, the models that use a device are stopped as by `corral stop`:
running answers end, conversations are saved. When the time is over, those that were loaded are
loaded again, and requests load the others again. A model that a command starts meanwhile stays, and
is not stopped again.

With `yield` under `[devices]`, the memory of devices is read while models use them. `decide`
chooses the models that give way to other programs; requests load these again as far as there is
room, and without a request they return once they have had room for a while.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from attrs import define, field

from proxy.observe.metrics import counter
from supervisor.events import Emit, Event, Part
from supervisor.fleet.devices import DeviceMonitor
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, phase_of, snapshots_of
from supervisor.loading.controller import AdmissionController
from supervisor.loading.decide import Eviction
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.settings.tables import DeviceSettings

if TYPE_CHECKING:
    from prometheus_client import Metric

_COMMAND: Final = "corral yield"
_QUIET_HOURS: Final = "quiet hours"
_REFUSAL: Final = "its devices are left to other programs (corral yield --end ends that)"
# The clock may be set, and a suspended machine misses the beginning of quiet hours.
_CLOCK_INTERVAL_S: Final = 30.0


def _local_time() -> datetime:
    return datetime.now(UTC).astimezone()


@define(eq=False, slots=False)
class DeviceYield(Part):
    task = "device yield"
    serves_until = "drain"

    _fleet: Fleet
    _admission: AdmissionController
    _memory_usage: MemoryUsage
    _devices: DeviceMonitor
    _emit: Emit
    _clock: Callable[[], float] = time.monotonic
    _local_time: Callable[[], datetime] = _local_time
    _ends_at_s: float | None = field(default=None, init=False)  # infinite without a limit
    _quiet_until: datetime | None = field(default=None, init=False)  # None if a command ended it
    _quiet_hours_end: datetime | None = field(default=None, init=False)
    _was_loaded: dict[str, bool] = field(factory=dict, init=False)  # by stopped model
    _has_room_since_s: dict[str, float] = field(factory=dict, init=False)  # by model that gave way
    _listed_bytes: list[int | None] = field(factory=list, init=False)  # of each card
    _counts: Counter[str] = field(factory=Counter, init=False)  # yields by reason
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)

    @property
    def models(self) -> list[str]:
        """The models that are stopped for it."""
        return [name for name in self._was_loaded if self._stopped(name)]

    @property
    def gave_way(self) -> list[str]:
        """The models that are unloaded because other programs needed their memory."""
        models = self._fleet.models
        return [
            name
            for name in self._admission.gave_way
            if name in models and models[name].is_configured
        ]

    @property
    def is_quiet_hours(self) -> bool:
        return self._quiet_until is not None

    @property
    def left_s(self) -> float | None:
        """Time until it ends, infinite without a limit; None if devices are not yielded."""
        lefts_s = []
        if self._ends_at_s is not None:
            lefts_s.append(self._ends_at_s - self._clock())
        if self._quiet_until is not None:
            lefts_s.append((self._quiet_until - self._local_time()).total_seconds())
        return max(0.0, *lefts_s) if lefts_s else None

    @property
    def _settings(self) -> DeviceSettings:
        return self._fleet.planner.settings.devices

    def begin(self, duration_s: float) -> Callable[[], bool]:
        """Yield all devices for this time from now on; return whether all models have stopped."""
        self._ends_at_s = self._clock() + duration_s
        self._changed.set()
        return self._stop_models(_COMMAND)

    def _stop_models(self, reason: str) -> Callable[[], bool]:
        using = [
            model
            for model in self._fleet.models.values()
            if model.is_configured and model.is_open and self._memory_usage.take_devices([model])
        ]
        names = [model.entry.name for model in using]
        returning = {*self._admission.waiting(), *self._admission.gave_way}
        for model in using:
            name, phase = model.entry.name, phase_of(model, snapshots_of(model))
            self._was_loaded[name] = name in returning or phase in {"loading", "loaded"}
        self._emit("devices.yielded", models=" ".join(names), reason=reason)
        # Without a name it would stop all.
        is_over = self._admission.command("stop", names) if names else lambda: True
        for model in using:
            model.refusal = _REFUSAL
        return is_over

    def end(self) -> Callable[[], bool]:
        """Load the models again that were loaded; return whether that is over."""
        self._ends_at_s = self._quiet_until = None
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

    def observe(self, event: Event) -> None:
        if event.name == "devices.yielded":
            self._counts[str(event.fields["reason"])] += 1
        if event.name in {"settings.reloaded", "instance.state_changed"}:
            self._changed.set()

    def metrics(self) -> Iterator[Metric]:
        yield counter("device_yields", {(reason,): n for reason, n in self._counts.items()})

    async def serve(self) -> None:
        while True:
            self._changed.clear()
            pause_s = await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def look(self) -> float | None:
        """Do what time and memory ask for; return the seconds until the next look, if any."""
        self._follow_quiet_hours()
        if self.left_s == 0:
            self.end()
        left_s = self.left_s
        pauses_s = [] if left_s is None or math.isinf(left_s) else [left_s]
        if self._settings.quiet_hours:
            pauses_s.append(_CLOCK_INTERVAL_S)
        if self._settings.yields != "never" and (models := self._using_models()):
            await self._read_memory(models)
            self._admission.wake()
            self._return_model()
            pauses_s.append(self._settings.check_interval_s)
        return min(pauses_s, default=None)

    def _follow_quiet_hours(self) -> None:
        before, end = self._quiet_hours_end, self._settings.quiet_until(self._local_time())
        self._quiet_hours_end = end
        if end and end != before:
            self._quiet_until = end
            self._stop_models(_QUIET_HOURS)
        elif end is None and self._quiet_until:
            self._quiet_until = None
            if self._ends_at_s is None:
                self.end()

    def _using_models(self) -> list[Model]:
        """Return the models that use a device, and those that gave way."""
        return [
            model
            for name, model in self._fleet.models.items()
            if model.is_configured
            and (
                name in self._admission.gave_way or phase_of(model, snapshots_of(model)) == "loaded"
            )
            and self._memory_usage.take_devices([model])
        ]

    async def _read_memory(self, models: list[Model]) -> None:
        """List the devices again if the memory of a card has changed, or is unknown.

        A listing takes time, and memory of the device.
        """
        await self._devices.refresh()
        cards = self._devices.latest
        used_bytes = [card.memory_used_bytes for card in cards]
        free_bytes = [
            card.memory_free_bytes for card in cards if card.memory_free_bytes is not None
        ]
        is_known = len(free_bytes) == len(cards) and not any(self._memory_usage.returning.values())
        if used_bytes and is_known and used_bytes == self._listed_bytes:
            return
        is_full = any(size < self._settings.reserve for size in free_bytes)
        if await self._memory_usage.refresh_devices(models, is_full=is_full):
            self._listed_bytes = used_bytes

    def _return_model(self) -> None:
        """Load one of the models that gave way if it has had room for long enough."""
        now_s = self._clock()
        self._has_room_since_s = {
            name: self._has_room_since_s.get(name, now_s)
            for name in self.gave_way
            if self._memory_usage.has_room(model := self._fleet.models[name])
            and self._admission.forecast(model) == Eviction()
        }
        for name, since_s in self._has_room_since_s.items():
            if now_s - since_s >= self._settings.return_after_s:
                self._emit("devices.taken_back", models=name)
                self._admission.command("load", [name])
                return
