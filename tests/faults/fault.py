"""A fault: a function that harms a running daemon, and yields expected and observed results.

Both are short texts; a fault is DIFFERENT where they are not equal.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.daemon_under_test import DaemonUnderTest, Models
from support.corral_cli import CorralCli
from support.fork_server import ForkServer

from supervisor.errors import CorralError

Seen = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Fault:
    """One fault of the list.

    Attributes:
        number: In the list of 44.
        inject: Harms the daemon, and yields pairs of expected and observed results.
        quick: Whether it runs in the test suite.
    """

    number: int
    name: str
    inject: Callable[[DaemonUnderTest], Seen]
    quick: bool = False


@dataclass(frozen=True)
class Result:
    expected: str
    seen: str

    @property
    def is_same(self) -> bool:
        return self.expected == self.seen


@dataclass
class Faults:
    entries: list[Fault] = field(default_factory=list)

    def add(
        self, number: int, name: str, *, quick: bool = False
    ) -> Callable[[Callable[[DaemonUnderTest], Seen]], Callable[[DaemonUnderTest], Seen]]:
        """Return a decorator that adds a function under its number."""

        def enter(inject: Callable[[DaemonUnderTest], Seen]) -> Callable[[DaemonUnderTest], Seen]:
            self.entries.append(Fault(number, name, inject, quick))
            return inject

        return enter


def run(fault: Fault, models: Models, fork_server: ForkServer | None = None) -> Result:
    """Inject a fault into a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        target = DaemonUnderTest(CorralCli(Path(directory), fork_server), models)
        expected, seen = zip(*_seen(fault, target), strict=True)
        return Result("; ".join(expected), "; ".join(seen))


def _seen(fault: Fault, target: DaemonUnderTest) -> Seen:
    try:
        yield from fault.inject(target)
    except (AssertionError, OSError, CorralError, subprocess.SubprocessError) as error:
        yield "no surprise", f"{type(error).__name__}: {error}"
    try:
        target.corral.end()
    except AssertionError as error:
        yield "no engine left", f"engines left: {error}"
    else:
        yield "no engine left", "no engine left"
