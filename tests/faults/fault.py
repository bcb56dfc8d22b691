"""What a fault is.

A fault is a function that takes a place, does its harm, and yields what it expected and what it
saw, as short texts. They are the same, or the fault is told as DIFFERENT.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from end_to_end.home import Corral
from faults.daemon_under_test import Models, Place

from supervisor.errors import CorralError

Seen = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Fault:
    """One fault of the list.

    Attributes:
        number: In the list of 44.
        name: What goes wrong.
        bring: Brings it about, and tells what is expected and seen.
        quick: Whether it runs in the test suite.
    """

    number: int
    name: str
    bring: Callable[[Place], Seen]
    quick: bool = True


@dataclass(frozen=True)
class Result:
    """What came of a fault.

    Attributes:
        expected: What should have been seen.
        seen: What was.
    """

    expected: str
    seen: str

    @property
    def is_same(self) -> bool:
        """Tell whether all was as expected."""
        return self.expected == self.seen


@dataclass
class Faults:
    """A list that functions are entered into."""

    entries: list[Fault] = field(default_factory=list)

    def add(
        self, number: int, name: str, *, quick: bool = True
    ) -> Callable[[Callable[[Place], Seen]], Callable[[Place], Seen]]:
        """Return a decorator that enters a function under its number."""

        def enter(bring: Callable[[Place], Seen]) -> Callable[[Place], Seen]:
            self.entries.append(Fault(number, name, bring, quick))
            return bring

        return enter


def look(fault: Fault, models: Models) -> Result:
    """Bring a fault about in a place of its own, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        place = Place(Corral(Path(directory)), models)
        expected, seen = zip(*_seen(fault, place), strict=True)
        return Result("; ".join(expected), "; ".join(seen))


def _seen(fault: Fault, place: Place) -> Seen:
    try:
        yield from fault.bring(place)
    except (AssertionError, OSError, CorralError, subprocess.SubprocessError) as error:
        yield "no surprise", f"{type(error).__name__}: {error}"
    try:
        place.corral.end()
    except AssertionError as error:
        yield "no engine left", f"engines left: {error}"
    else:
        yield "no engine left", "no engine left"
