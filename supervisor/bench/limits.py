"""How many rounds a bench takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_REPEATS: Final = 5
_MOST_REPEATS: Final = 1000


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """At most this many rounds, and, if set, at most this long."""

    repeats: int
    limit_s: float | None

    @classmethod
    def of(cls, repeats: int | None, minutes: float | None) -> RoundLimits:
        """With a time alone, as many rounds as fit in it; with neither, five."""
        if minutes is None:
            return cls(repeats or DEFAULT_REPEATS, None)
        return cls(repeats or _MOST_REPEATS, 60 * minutes)

    @property
    def planned(self) -> int | None:
        """The number of rounds; None if the time decides."""
        return self.repeats if self.limit_s is None else None

    def may_begin(self, done: int, elapsed_s: float, longest_s: float) -> bool:
        """Whether another round may begin; the first one always may.

        Args:
            done: Complete rounds.
            elapsed_s: Since the start.
            longest_s: What the longest round took.
        """
        if done == 0 or self.limit_s is None:
            return done < self.repeats
        return done < self.repeats and elapsed_s + longest_s <= self.limit_s
