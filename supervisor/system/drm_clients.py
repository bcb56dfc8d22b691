"""How much memory of each card programs hold, as Linux tells it for each open file of a card.

A user can read those of its own processes, and root all. Several may be of one client, whose memory
counts once.

Source: Linux, Documentation/gpu/drm-usage-stats.rst; drivers/gpu/drm/{xe/xe_drm_client.c,
i915/i915_drm_client.c, amd/amdgpu/amdgpu_fdinfo.c}.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from supervisor.system.limits import kernel_text

_PROCESSES_MAX: Final = 100_000
_CARDS: Final = "/dev/dri/"
_UNITS: Final = {"": 1, "KiB": 1024, "MiB": 1024**2}
# What is in memory now; what was allocated; the same by older kernels. Memory of the card is named
# `vram0` by xe, `local0` by i915 and `vram` by amdgpu; all other names are main memory.
_KINDS: Final = ("resident", "total", "memory")
_MEMORY: Final = re.compile(r"drm-(resident|total|memory)-((?:vram|local)\d*)")


def memory_by_card(root: Path) -> Mapping[str, int]:
    """Return the bytes that programs hold, by the card's address on the bus.

    Takes 6 ms for 600 descriptors.
    """
    clients: dict[tuple[str, str], int] = {}
    for process in itertools.islice((root / "proc").glob("[0-9]*"), _PROCESSES_MAX):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                if not _is_of_card(descriptor):
                    continue
                facts = _facts_of(kernel_text(process / "fdinfo" / descriptor.name))
                address, client = facts.get("drm-pdev"), facts.get("drm-client-id")
                size = _held_bytes(facts)
                if address and client and size is not None:
                    clients[address, client] = size
    held: Counter[str] = Counter()
    for (address, _), size in clients.items():
        held[address] += size
    return held


def _is_of_card(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith(_CARDS)
    except OSError:  # closed meanwhile
        return False


def _facts_of(text: str) -> Mapping[str, str]:
    lines = (line.partition(":") for line in text.splitlines())
    return {key: value.strip() for key, _, value in lines}


def _held_bytes(facts: Mapping[str, str]) -> int | None:
    """Return the memory of its card that a client holds; None if the driver does not tell it."""
    found: dict[str, int] = {}
    for key, value in facts.items():
        number, _, unit = value.partition(" ")
        if (match := _MEMORY.fullmatch(key)) and number.isdecimal() and unit in _UNITS:
            found[match[1]] = found.get(match[1], 0) + int(number) * _UNITS[unit]
    return next((found[kind] for kind in _KINDS if kind in found), None)
