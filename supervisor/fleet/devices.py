"""The readings of the machine's cards, taken in a thread on request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from proxy.observe.metrics import gauge
from supervisor.events import Part
from supervisor.system.devices import REASONS, DeviceReading, read_devices

_FRESH_S: Final = 2.0
_OLD_S: Final = 15.0
# Prometheus reads each minute or more often.
_WATCH_S: Final = 90.0

_MIB: Final = 1024**2
# Names and units as in NVIDIA's DCGM exporter, whose dashboards and alerts then work here.
_LABELS: Final = ("gpu", "UUID", "modelName")
_FIGURES: Final[Sequence[tuple[str, str, Callable[[DeviceReading], float | None]]]] = (
    (
        "DCGM_FI_DEV_GPU_UTIL",
        "Share of the time in which a card computed, in %.",
        lambda card: None if card.load is None else 100 * card.load,
    ),
    (
        "DCGM_FI_DEV_FB_USED",
        "Used memory of a card, in MiB.",
        lambda card: _mib(card.memory_used_bytes),
    ),
    (
        "DCGM_FI_DEV_FB_FREE",
        "Free memory of a card, in MiB.",
        lambda card: _mib(card.memory_free_bytes),
    ),
    (
        "DCGM_FI_DEV_GPU_TEMP",
        "Temperature of a card, in degrees Celsius.",
        lambda card: card.temperature_c,
    ),
    ("DCGM_FI_DEV_POWER_USAGE", "Power of a card, in W.", lambda card: card.power_w),
    (
        "DCGM_FI_DEV_POWER_MGMT_LIMIT",
        "Power limit of a card, in W.",
        lambda card: card.power_limit_w,
    ),
    # A counter, but one of Prometheus' client would have another name.
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy that a card has used, in mJ.",
        lambda card: None if card.energy_j is None else 1000 * card.energy_j,
    ),
)


def _mib(count_bytes: int | None) -> float | None:
    return None if count_bytes is None else count_bytes / _MIB


class DeviceMonitor(Part):
    """Takes readings on request, and every 5 s for 90 s after `watch`.

    A driver that hangs keeps its thread: nobody waits for it, and there is no second one.
    """

    task = "devices"

    def __init__(
        self,
        read: Callable[[], Sequence[DeviceReading]] = read_devices,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit_s: float = 1.0,
        interval_s: float = 5.0,
    ) -> None:
        self._read = read
        self._clock = clock
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._readings: Sequence[DeviceReading] = ()
        self._taken_at_s = self._began_at_s = self._watched_at_s = float("-inf")
        self._is_taken = asyncio.Event()
        self._is_taken.set()
        self._watched = asyncio.Event()

    @property
    def latest(self) -> Sequence[DeviceReading]:
        """The latest readings; none after 15 s."""
        return self._readings if self._clock() - self._taken_at_s < _OLD_S else ()

    def watch(self) -> Sequence[DeviceReading]:
        """Return the latest readings; for the next 90 s they are taken every 5 s."""
        self._watched_at_s = self._clock()
        self._watched.set()
        return self.latest

    async def refresh(self) -> None:
        """Take readings unless there are some of the last 2 s; wait for them at most a second."""
        now_s = self._clock()
        if now_s - self._taken_at_s >= _FRESH_S and self._is_taken.is_set():
            self._is_taken.clear()
            self._began_at_s = now_s
            loop = asyncio.get_running_loop()
            # Not of the default executor, for whose threads an exit waits.
            threading.Thread(target=self._run, args=(loop,), daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._began_at_s + self._limit_s - now_s):
                await self._is_taken.wait()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        found: Sequence[DeviceReading] = ()
        try:
            found = self._read()
        finally:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: Sequence[DeviceReading]) -> None:
        self._readings, self._taken_at_s = found, self._clock()
        self._is_taken.set()

    async def serve(self) -> None:
        while True:
            await self._watched.wait()
            while self._clock() - self._watched_at_s < _WATCH_S:
                await self.refresh()
                await asyncio.sleep(self._interval_s)
            self._watched.clear()

    def metrics(self) -> Iterator[Metric]:
        cards = {
            (str(number), card.id, card.name): card for number, card in enumerate(self.watch())
        }
        for name, text, value_of in _FIGURES:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, card in cards.items():
                if (value := value_of(card)) is not None:
                    family.add_metric(labels, value)
            yield family
        yield gauge(
            "device_throttled",
            {
                (*labels, reason): float(reason in card.throttled)
                for labels, card in cards.items()
                if card.throttled is not None
                for reason in REASONS
            },
        )
