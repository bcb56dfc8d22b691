"""The daemon's latest events, numbered; listeners take those that are new to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from proxy.dashboard.host import HostEvent

_KEPT: Final = 100
# Told by the state.
_LEFT_OUT: Final = frozenset({"instance.load_progress"})


class EventHistory:
    def __init__(self) -> None:
        self.last_seq = 0
        self._events: deque[HostEvent] = deque(maxlen=_KEPT)

    def add(self, event: HostEvent) -> None:
        if event.name not in _LEFT_OUT:
            self._events.append(event)
            self.last_seq += 1

    def after(self, seq: int) -> list[dict[str, Any]]:
        """The events with a larger number that are still kept."""
        first = self.last_seq - len(self._events) + 1
        numbered = enumerate(self._events, first)
        return [_shown(number, event) for number, event in numbered if number > seq]


def _shown(seq: int, event: HostEvent) -> dict[str, Any]:
    fields: Mapping[str, object] = event.fields
    return {
        "seq": seq,
        "at": event.at.isoformat(timespec="milliseconds"),
        "name": event.name,
        "level": event.level,
        "fields": {name: value for name, value in fields.items() if value is not None},
    }
