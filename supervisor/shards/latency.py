"""The time that a worker computes, from when it was asked and when it answered. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

_PENDING_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Forwards:
    """Passes that a worker has computed, and the time of each."""

    count: int
    each_s: float


class ComputeTimer:
    """Times compute commands, which have no response, by the next response of their connection.

    A worker serves a connection in order, so that response comes once all commands before it are
    done. Several of them were computed one after another, some perhaps while the next one was still
    to come: with equal times `s`, the response comes at the latest of `asked + s * (those from that
    one on)`, and that is solved for `s`.
    """

    def __init__(self) -> None:
        self._asked_at_s: deque[float] = deque(maxlen=_PENDING_MAX)

    def asked(self, at_s: float) -> None:
        """A compute command was sent."""
        self._asked_at_s.append(at_s)

    def answered(self, at_s: float) -> Forwards | None:
        """A response begins; return what was computed before it."""
        if not self._asked_at_s:
            return None
        count = len(self._asked_at_s)
        each_s = min(
            (at_s - asked_s) / (count - number) for number, asked_s in enumerate(self._asked_at_s)
        )
        self._asked_at_s.clear()
        return Forwards(count, each_s)
