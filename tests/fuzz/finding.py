"""Findings, reported once for each cause, with the bytes that reproduce them."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_EXAMPLES_MAX: Final = 3
_FILES_MAX: Final = 40
_VARIABLE: Final = re.compile(r"req_\w+|0x[0-9a-f]+|\d{3}\d+|(?<=[.\[( ])\d+")


@dataclass(frozen=True)
class Example:
    """The bytes of an input.

    Attributes:
        name: The file to write it to.
        how: How it was sent or read.
    """

    name: str
    data: bytes
    how: str = ""


@dataclass
class Findings:
    """All findings.

    Attributes:
        directory: Where the inputs are stored.
        counts: How often each cause occurred.
        reports: The first report of each cause.
    """

    directory: Path
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    reports: dict[str, str] = field(default_factory=dict)

    def add(self, part: str, what: str, detail: str, examples: Sequence[Example] = ()) -> None:
        """Count a finding; store the inputs of the first few of each cause."""
        cause = f"{part}: {_VARIABLE.sub('…', what)}"
        self.counts[cause] += 1
        if self.counts[cause] > _EXAMPLES_MAX:
            return
        where = self._write(part, what, detail, examples)
        text = f"FOUND  {part}: {what}\n       {detail[-600:]}\n       inputs: {where}"
        self.reports.setdefault(cause, text)
        print(text, file=sys.stderr, flush=True)

    def _write(self, part: str, what: str, detail: str, examples: Sequence[Example]) -> Path:
        slug = re.sub(r"\W+", "-", what)[:50].strip("-")
        where = self.directory / f"{part}-{sum(self.counts.values()):04d}-{slug}"
        where.mkdir(parents=True, exist_ok=True)
        again = f"scripts/fuzz --seed {self.seed} --first NUMBER --requests 1 --only {part}"
        lines = [what, detail, "", f"one input again, by its number: {again}", ""]
        for example in examples[:_FILES_MAX]:
            (where / example.name).write_bytes(example.data)
            lines.append(f"{example.name}: {example.how}")
        (where / "finding.txt").write_text("\n".join(lines), "utf-8", errors="backslashreplace")
        return where


@dataclass
class Limits:
    """The time of a part from now, the number of its inputs, and the number of the first."""

    seconds: float
    inputs: int
    first: int = 0
    began_at_s: float = field(default_factory=time.monotonic)
    _next: int = field(init=False, default=0)

    def take(self) -> int | None:
        """Return the number of the next input; None at the end of the time or the inputs."""
        if self._next >= self.inputs or self.is_over():
            return None
        self._next += 1
        return self.first + self._next - 1

    def is_over(self) -> bool:
        return time.monotonic() - self.began_at_s > self.seconds

    @property
    def taken(self) -> int:
        return self._next


@dataclass
class Report:
    """A row of the final table: part, number of inputs, measurements as text."""

    part: str
    inputs: int
    figures: Mapping[str, str]
