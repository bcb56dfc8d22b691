"""An input to commands: a file, and the commands that read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Every exit code that docs/commands.md lists, without those of signals.
EXIT_CODES: Final = frozenset({0, 1, 3, 4, 69, 78})


@dataclass(frozen=True)
class Case:
    """A file, and the commands that read it.

    Attributes:
        path: Relative to the directory of the part.
        data: Its content, for `made_by` = `write`.
        commands: Arguments of `corral`; `{home}` is the directory of the part.
        made_by: `write`, or another kind of file: `fifo`, `directory`, `link`, `device`, `sparse`.
    """

    path: str
    data: bytes
    commands: tuple[tuple[str, ...], ...]
    made_by: str = "write"

    def words(self, home: Path) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(word.replace("{home}", str(home)) for word in c) for c in self.commands)
