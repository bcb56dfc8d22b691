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
        rounds: One entry for each round that began; those of all variants at one place belong
            together. None where nothing was measured.
        failure: Why it was given up, with the fix; None if it was not.
    """

    name: str
    profile: str | None
    argv: tuple[str, ...]
    rounds: tuple[Values | None, ...]
    failure: str | None = None

    def values(self, figure: str) -> tuple[float, ...]:
        """The figure's values of all rounds that have it."""
        return tuple(one[figure] for one in self.rounds if one and figure in one)


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
    """All that a bench found.

    Attributes:
        model_file: The name of the GGUF, without its directory.
        engine: The build, as it names itself.
        workloads: In the order in which each round runs them.
        rounds_planned: At a fixed number of repeats; None if the time decided.
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
    rounds_planned: int | None
    is_interrupted: bool
    figures: tuple[Figure, ...]
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """The number of rounds that began."""
        return max((len(one.rounds) for one in self.variants), default=0)
