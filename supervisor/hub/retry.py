"""When a broken request is tried again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ATTEMPTS: Final = 5
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 8.0
# A server that asks for more is told of to the user, who would else wait before a silent program.
ASKED_WAIT_MAX_S: Final = 60.0


class Interruption(Exception):
    """A request broke in a way that another attempt may not.

    Attributes:
        reason: A clause.
        wait_s: What the server asked to wait, if it did.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


@dataclass(slots=True)
class Attempts:
    """Counts the attempts since the last progress."""

    failed: int = 0

    def progressed(self) -> None:
        self.failed = 0

    def wait_s(self, broken: Interruption) -> float | None:
        """How long to wait before the next attempt; None to give up."""
        self.failed += 1
        if self.failed >= _ATTEMPTS:
            return None
        if broken.wait_s is None:
            return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (self.failed - 1))
        return broken.wait_s if broken.wait_s <= ASKED_WAIT_MAX_S else None
