"""An input to commands: a file, and what is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Every exit code that the README lists, without those of signals.
EXIT_CODES: Final = frozenset({0, 1, 3, 4, 69, 78})


@dataclass(frozen=True)
class Case:
    """A file, and the commands that read it.

    Attributes:
        path: Where the file is written, relative to the directory of the part.
        data: What it says; empty for a file that is made by a word.
        commands: Words of `corral`; `{home}` stands for the directory of the part.
        made_by: `write`, or what is made in the place of a file: `fifo`, `directory`, `link`,
            `device`, `sparse`.
    """

    path: str
    data: bytes
    commands: tuple[tuple[str, ...], ...]
    made_by: str = "write"

    def words(self, home: Path) -> tuple[tuple[str, ...], ...]:
        """Return the commands as they are run."""
        return tuple(tuple(word.replace("{home}", str(home)) for word in c) for c in self.commands)
