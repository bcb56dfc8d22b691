"""Which node is not asked again to load which model, and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_FIRST_S: Final = 30.0
_LAST_S: Final = 600.0
# Nodes come and go; the one that refused longest ago is forgotten first.
_REFUSALS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """Why a node does not load a model, and how often in a row it has not."""

    reason: str
    count: int
    until_s: float


def again_in_s(count: int) -> float:
    """Return the time until a node is asked again that refused so many times in a row."""
    return min(_FIRST_S * 2.0 ** min(count - 1, 16), _LAST_S)


class LoadRefusals:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: dict[tuple[str, str], LoadRefusal] = {}

    def reason(self, node: str, model: str) -> str | None:
        """Return why a node is not to be asked now; None where it may be."""
        refusal = self._refusals.get((node, model))
        return refusal.reason if refusal and self._clock() < refusal.until_s else None

    def add(self, node: str, model: str, reason: str) -> None:
        before = self._refusals.get((node, model))
        count = before.count + 1 if before else 1
        until_s = self._clock() + again_in_s(count)
        self._refusals.pop((node, model), None)
        self._refusals[node, model] = LoadRefusal(reason, count, until_s)
        if len(self._refusals) > _REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]

    def forget(self, node: str, model: str) -> None:
        """Note that a node has loaded a model."""
        self._refusals.pop((node, model), None)
