"""Whether an instance finds the device memory that it needs at its start. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from supervisor.memory.estimate import Estimate
from supervisor.output import size


def shortage(found: Estimate, free: Mapping[str, int]) -> str | None:
    """Why an instance would run out of device memory now, or None.

    Args:
        found: What it takes.
        free: Free bytes of the devices of this machine, as far as they are known.
    """
    for name, take in found.devices.items():
        if name in free and take.at_start > free[name]:
            return f"it needs {size(take.at_start)} of {name}, which has {size(free[name])} free"
    for name, one in found.workers.items():
        if one.free_bytes is not None and one.taken.at_start > one.free_bytes:
            return (
                f"it needs {size(one.taken.at_start)} of worker {name}, "
                f"which has {size(one.free_bytes)} free"
            )
    return None
