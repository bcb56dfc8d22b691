"""When models, and the whole daemon, have been without a request long enough. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

# Stands for all models together.
DAEMON = None
Subject = str | None


class IdleTimes:
    """When each last had a request; each is reported once, until it has another.

    `now_s` is the time at which the daemon began.
    """

    def __init__(self, now_s: float) -> None:
        self._active_at_s: dict[Subject, float] = {DAEMON: now_s}
        self._reported: set[Subject] = set()

    def touch(self, subject: Subject, now_s: float) -> bool:
        """A request ended, or a model was loaded; return whether it had been reported as idle."""
        self._active_at_s[subject] = now_s
        was_reported = subject in self._reported
        self._reported.discard(subject)
        return was_reported

    def forget(self, model: str) -> None:
        self._active_at_s.pop(model, None)
        self._reported.discard(model)

    def take_due(
        self, limits_s: Mapping[bool, float], busy: Collection[Subject], now_s: float
    ) -> list[tuple[Subject, float]]:
        """Return what is idle since the last call, and for how long.

        Args:
            limits_s: Of a model (False), and of the daemon (True); infinite for never.
            busy: What has a request in flight.
            now_s: The time.
        """
        for subject in busy:
            if subject in self._active_at_s:
                self.touch(subject, now_s)
        due = [
            (subject, now_s - at_s)
            for subject, at_s in self._active_at_s.items()
            if subject not in self._reported and now_s - at_s >= limits_s[subject is DAEMON]
        ]
        self._reported.update(subject for subject, _ in due)
        return due

    def next_at_s(self, limits_s: Mapping[bool, float]) -> float:
        """Return when the next one can be due; infinite for never."""
        return min(
            (
                at_s + limits_s[subject is DAEMON]
                for subject, at_s in self._active_at_s.items()
                if subject not in self._reported
            ),
            default=math.inf,
        )
