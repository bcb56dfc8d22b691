"""How far estimates were from what happened, by model. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

BOUNDS: Final = (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.0, 5.0)
_MODELS_MAX: Final = 64
# A first token comes no sooner.
_REAL_MIN_S: Final = 0.001


class ErrorHistograms:
    """Counts of errors by inclusive upper bounds, not cumulative, and their sum."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def add(self, model: str, estimated_s: float, real_s: float) -> None:
        """Count one estimate; of more than 64 models the others are not counted."""
        if model not in self._counts:
            if len(self._counts) >= _MODELS_MAX:
                return
            self._counts[model], self._totals[model] = [0] * (len(BOUNDS) + 1), 0.0
        real_s = max(real_s, _REAL_MIN_S)
        error = abs(estimated_s - real_s) / real_s
        self._counts[model][bisect_left(BOUNDS, error)] += 1
        self._totals[model] += error

    @property
    def by_model(self) -> Mapping[str, tuple[list[int], float]]:
        return {model: (counts, self._totals[model]) for model, counts in self._counts.items()}
