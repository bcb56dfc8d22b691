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
        is_unresolved: The server's name has no address, as without a network.
    """

    def __init__(
        self, reason: str, wait_s: float | None = None, *, is_unresolved: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s
        self.is_unresolved = is_unresolved


@dataclass(slots=True)
class Attempts:
    """Counts the attempts since the last progress."""

    failed: int = 0
    has_progressed: bool = False

    def progressed(self) -> None:
        self.failed = 0
        self.has_progressed = True

    def wait_s(self, broken: Interruption) -> float | None:
        """How long to wait before the next attempt; None to give up."""
        self.failed += 1
        # A download that runs outlives a gap in the network.
        is_offline = broken.is_unresolved and not self.has_progressed
        if is_offline or self.failed >= _ATTEMPTS:
            return None
        if broken.wait_s is None:
            return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (self.failed - 1))
        return broken.wait_s if broken.wait_s <= ASKED_WAIT_MAX_S else None
