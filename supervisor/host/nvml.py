"""Energy counters of NVIDIA devices, by the library that the driver brings.

Four functions, called directly: a package for them would be installed on every machine without a
device too. Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was
loaded; Volta or newer).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Final, Protocol

_LIBRARY: Final = "libnvidia-ml.so.1"
_DEVICES_MAX: Final = 64
_MILLIJOULES: Final = 1e3
_OK: Final = 0


class Library(Protocol):
    """NVML, whose functions return 0 on success."""

    def __getattr__(self, function: str) -> Callable[..., int]: ...


@functools.cache
def library() -> Library | None:
    """Load the library; None without a driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def joules(nvml: Library) -> Mapping[str, float] | None:
    """Read the counter of each device; None without devices, or if one cannot be read."""
    try:
        count = ctypes.c_uint()
        # May be called often: the library counts its users.
        if nvml.nvmlInit_v2() != _OK or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
            return None
        values = [_joules_of(nvml, i) for i in range(min(count.value, _DEVICES_MAX))]
    except AttributeError:  # a driver too old for one of the functions
        return None
    known = {str(i): value for i, value in enumerate(values) if value is not None}
    return known if known and len(known) == len(values) else None


def _joules_of(nvml: Library, index: int) -> float | None:
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != _OK:
        return None
    if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) != _OK:
        return None
    return energy.value / _MILLIJOULES
