"""Whether a line is sent again after an answer, and when. Pure.

429 and 503 say that the daemon is busy, that the model loads, or that it was stopped or failed: the
line is not at fault, and waits as long as its batch may. If its key has used up what it may, all
lines of its batch wait, and none of another key. One that failed in an instance is tried a
few times. What the client could change is its result at once, and so is a request that crashed
engines twice (422).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.batch.requests import OwnAnswer

_BUSY: Final = frozenset({429, 503})
_FAILED: Final = frozenset({500, 502, 504})
_FIRST_S: Final = 1.0
_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Send it again after `wait_s`.

    Attributes:
        is_counted: As one of a few attempts.
        leaves_place: Others may be computed meanwhile.
    """

    wait_s: float
    is_counted: bool
    leaves_place: bool = False


def retry_of(answer: OwnAnswer, failures: int, waits: int, max_attempts: int) -> Retry | None:
    """What follows an answer; None: it is the result.

    Args:
        answer: The answer.
        failures: Counted attempts before this one.
        waits: Attempts before this one that were not counted.
        max_attempts: Counted attempts at most.
    """
    if answer.is_limited:
        wait_s = min(answer.retry_after_s or _FIRST_S, _MAX_S)
        return Retry(wait_s, is_counted=False, leaves_place=True)
    if answer.status in _BUSY:
        return Retry(_pause_s(waits, answer.retry_after_s), is_counted=False)
    if answer.status in _FAILED and failures + 1 < max_attempts:
        return Retry(_pause_s(failures, answer.retry_after_s), is_counted=True)
    return None


def _pause_s(before: int, hint_s: int | None) -> float:
    doubled_s = _FIRST_S * 2.0 ** min(before, 10)
    return min(max(doubled_s, hint_s or 0.0), _MAX_S)
