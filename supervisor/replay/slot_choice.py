"""Which slot a request takes on an engine that leaves that to its clients. Does no I/O.

Here it is that whose last prompt has the longest beginning in common with the request, if that is
half of the request; else the one that was used longest ago. The proxy knows more, and does much
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

_PROMPT: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
_SHARED_MIN: Final = 0.5


class SlotChoice:
    """The slots of one engine that nothing else uses; as many requests at once as slots."""

    def __init__(self, slots: int) -> None:
        # The one used longest ago first.
        self._free: dict[int, str] = dict.fromkeys(range(slots), "")

    def take(self, body: Mapping[str, Any]) -> int:
        """Return a free slot, which is then in use; raises StopIteration without one."""
        text = prompt_text(body)
        shared = {slot: _shared(text, last) for slot, last in self._free.items()}
        best = max(shared, key=lambda slot: shared[slot])
        has_enough = shared[best] and shared[best] >= _SHARED_MIN * len(text)
        slot = best if has_enough else next(iter(self._free))
        del self._free[slot]
        return slot

    def give_back(self, slot: int, body: Mapping[str, Any]) -> None:
        self._free[slot] = prompt_text(body)


def prompt_text(body: Mapping[str, Any]) -> str:
    """Return what of a request begins as its conversation did; its end is not closed."""
    found = [body[name] for name in _PROMPT if body.get(name)]
    return orjson.dumps(found).decode().rstrip('"]}')


def _shared(text: str, other: str) -> int:
    """Return how many letters two texts begin with in common."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
