"""NVIDIA's library under its real Python binding, with made cards and one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pynvml
import pytest

from supervisor.system import devices

NOT_SUPPORTED: Final = 3
NOT_LOADED: Final = 9
GPU_IS_LOST: Final = 15
MIB: Final = 1024**2


class Library:
    """Functions as in nvml.h: they fill what a pointer points to, and return 0 or an error.

    `fault` names a function that returns `error`, on the last card if it is about cards; or "all"
    for each function about the last card. `missing` names a function that the driver lacks.
    """

    def __init__(
        self, cards: int = 1, *, fault: str = "", error: int = NOT_SUPPORTED, missing: str = ""
    ) -> None:
        self._cards = cards
        self._fault = fault
        self._error = error
        self._missing = missing
        self._card = 0
        self._energy_mj = 5000
        self.is_open = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        what = name.removeprefix("nvmlDeviceGet")
        is_of_card = what not in {name, "Count_v2"}
        if name == self._missing or name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            fill: Callable[..., None] = getattr(self, f"_{what}")
            if what == "HandleByIndex_v2":
                self._card = arguments[0].value
            is_last = self._card == self._cards - 1
            if (what == self._fault or (is_of_card and self._fault == "all")) and (
                is_last or not is_of_card
            ):
                return self._error
            fill(*arguments)
            return 0

        return call

    def _nvmlInitWithFlags(self, _flags: int) -> None:  # noqa: N802 (as in nvml.h)
        self.is_open = True

    def _nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def _nvmlSystemGetDriverVersion(self, text: Any, _length: Any) -> None:  # noqa: N802
        text.value = b"580.82.07"

    def _Count_v2(self, count: Any) -> None:  # noqa: N802
        count._obj.value = self._cards

    def _HandleByIndex_v2(self, _index: Any, _handle: Any) -> None:  # noqa: N802
        assert self.is_open

    def _UUID(self, _handle: Any, text: Any, _length: Any) -> None:  # noqa: N802
        text.value = b"GPU-%d" % self._card

    def _Name(self, _handle: Any, text: Any, _length: Any) -> None:  # noqa: N802
        text.value = b"NVIDIA H100 80GB HBM3"

    def _UtilizationRates(self, _handle: Any, rates: Any) -> None:  # noqa: N802
        rates._obj.gpu = 43

    def _MemoryInfo(self, _handle: Any, memory: Any) -> None:  # noqa: N802
        memory._obj.total, memory._obj.used = 81_559 * MIB, 20_500 * MIB
        memory._obj.free = 61_059 * MIB

    def _MemoryInfo_v2(self, _handle: Any, memory: Any) -> None:  # noqa: N802
        memory._obj.total, memory._obj.used = 81_559 * MIB, 20_000 * MIB
        memory._obj.reserved, memory._obj.free = 500 * MIB, 61_059 * MIB

    def _Temperature(self, _handle: Any, _sensor: Any, degrees: Any) -> None:  # noqa: N802
        degrees._obj.value = 61

    def _PowerUsage(self, _handle: Any, milliwatts: Any) -> None:  # noqa: N802
        milliwatts._obj.value = 312_400

    def _EnforcedPowerLimit(self, _handle: Any, milliwatts: Any) -> None:  # noqa: N802
        milliwatts._obj.value = 700_000

    def _CurrentClocksThrottleReasons(self, _handle: Any, reasons: Any) -> None:  # noqa: N802
        reasons._obj.value = 0x4 | 0x2  # the power limit; and clocks that the user chose

    def _TotalEnergyConsumption(self, _handle: Any, millijoules: Any) -> None:  # noqa: N802
        millijoules._obj.value = self._energy_mj * (1000 if self._card else 1)
        self._energy_mj += 500


def install(patch: pytest.MonkeyPatch, library: object) -> None:
    """Have the binding use this library."""
    patch.setattr(pynvml, "nvmlLib", library)
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    patch.setattr(devices, "load_nvml", lambda: pynvml)
