"""The result of a bench: what was measured, on what, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from supervisor.bench.figures import Figure

# One round of one variant: figure name → value. What could not be read, or was not reached, is
# absent.
Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """What was measured of one way to run the model.

    Attributes:
        profile: None for the engine's own defaults.
        argv: The command line, without the address it listens on.
        rounds: One entry for each round; those of all variants at one place belong together.
        failure: Why it was given up, with the fix; None if it was not.
    """

    name: str
    profile: str | None
    argv: tuple[str, ...]
    rounds: tuple[Values, ...]
    failure: str | None = None

    def values(self, figure: str) -> tuple[float, ...]:
        """The figure's values of all rounds that have it."""
        return tuple(one[figure] for one in self.rounds if figure in one)


@dataclass(frozen=True, slots=True)
class BenchMachine:
    """The machine in words that identify no person."""

    processor: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    devices: tuple[str, ...]
    system: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that a bench found; the first variant is the one that the others are compared with.

    Attributes:
        model_file: The name of the GGUF, without its directory.
        engine: The build, as it names itself.
        workloads: In the order in which each round runs them.
        rounds: Complete ones.
        rounds_planned: None if the time decided.
        figures: Those that some variant has, in the order to show them.
        notes: Sentences for the reader.
    """

    model: str
    model_file: str
    engine: str
    machine: BenchMachine
    began_at: datetime
    duration_s: float
    seed: int
    workloads: tuple[str, ...]
    rounds: int
    rounds_planned: int | None
    is_interrupted: bool
    figures: tuple[Figure, ...]
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

    def paired(self, base: Variant, other: Variant, figure: str) -> list[tuple[float, float]]:
        """The figure's values of both variants, from the rounds in which both have it."""
        rounds = zip(base.rounds, other.rounds, strict=True)
        return [(a[figure], b[figure]) for a, b in rounds if figure in a and figure in b]
