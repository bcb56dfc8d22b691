"""The last free slot of a model, which batch requests leave to interactive ones.

A batch fills every idle slot, so each interactive request would wait until one of its answers ends.
For half a minute after an interactive request, batch requests therefore leave one slot free, of
those on instances that are not spare, if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from proxy.request import ProxyRequest
from proxy.router.instances import Instance

_LEFT_S: Final = 30.0


class LastSlot:
    def __init__(self) -> None:
        self._ended_at_s = -math.inf

    def note_ended(self, request: ProxyRequest, now_s: float) -> None:
        if request.priority == "interactive":
            self._ended_at_s = now_s

    def left_s(self, now_s: float) -> float:
        """Return for how long it is still left free; 0: it is not."""
        return max(0.0, self._ended_at_s + _LEFT_S - now_s)


def with_last_slot(instances: Sequence[Instance], request: ProxyRequest) -> list[Instance]:
    """Return the instances that have the last slot, if a request would take it."""
    own = [one for one in instances if not one.is_spare]
    slots = sum(one.upstream.slots for one in own)
    is_last = sum(one.free for one in own) <= min(request.slots, slots - 1)
    return own if is_last else []
