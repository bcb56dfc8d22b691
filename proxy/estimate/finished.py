"""The latest finished requests of one instance, of which some are yet to be learned from."""

from __future__ import annotations

from collections import deque
from typing import Final

from proxy.estimate.measures import Finished

# More than may have overlapped the latest.
_KEPT_MAX: Final = 32


class FinishedRequests:
    def __init__(self) -> None:
        self._latest: deque[Finished] = deque(maxlen=_KEPT_MAX)
        self._unlearned = 0

    def add(self, finished: Finished) -> None:
        self._latest.append(finished)
        self._unlearned += 1

    def latest(self) -> list[Finished]:
        return list(self._latest)

    def take_unlearned(self) -> list[Finished]:
        """Return those that came since the last call, as far as they are kept."""
        count, self._unlearned = self._unlearned, 0
        return self.latest()[-count:] if count else []
