"""What a bench has measured so far. It stays complete at every moment, for Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from supervisor.bench.result import Values


class Measurements:
    """The values of each variant, round by round."""

    def __init__(self, variants: Iterable[str]) -> None:
        self._rounds: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        self._failures: dict[str, str] = {}
        self._notes: dict[str, None] = {}  # in order, each once
        self._others_cores: list[float] = []
        self.complete_rounds = 0

    def begin_round(self) -> None:
        for rounds in self._rounds.values():
            rounds.append({})

    def end_round(self) -> None:
        self.complete_rounds += 1

    def add(self, variant: str, values: Mapping[str, float]) -> None:
        """Add values to the present round."""
        self._rounds[variant][-1].update(values)

    def give_up(self, variant: str, reason: str) -> None:
        self._failures.setdefault(variant, reason)

    def note(self, text: str) -> None:
        self._notes[text] = None

    def add_load(self, others_cores: float | None) -> None:
        """Add the cores that other programs took while a variant was measured."""
        if others_cores is not None:
            self._others_cores.append(others_cores)

    @property
    def others_cores(self) -> tuple[float, ...]:
        return tuple(self._others_cores)

    @property
    def has_values(self) -> bool:
        return any(values for rounds in self._rounds.values() for values in rounds)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def running(self) -> tuple[str, ...]:
        """The variants that were not given up."""
        return tuple(name for name in self._rounds if name not in self._failures)

    def rounds(self, variant: str) -> tuple[Values | None, ...]:
        return tuple(dict(values) or None for values in self._rounds[variant])

    def failure(self, variant: str) -> str | None:
        return self._failures.get(variant)
