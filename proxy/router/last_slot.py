"""The last free slot of a model, which batch requests leave to interactive ones.

A batch fills every idle slot, so each interactive request would wait until one of its answers ends.
For half a minute after an interactive request, batch requests therefore leave one slot free, of
those on instances that are not spare, if there are several.
"""

from __future__ import annotations

import math
from typing import Final

from proxy.request import ProxyRequest
from proxy.router.model_instances import ModelInstances

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


def is_last_slot(of_model: ModelInstances, request: ProxyRequest) -> bool:
    """Return whether a request would take the last slot of those that are not spare."""
    return of_model.own_free <= min(request.slots, of_model.own_slots - 1)
