"""Looks for files in a directory tree of unknown size, without losing itself in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_HIDDEN: Final = "."


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one walk; at any of them it ends early, with a note."""

    entries: int = 50_000
    depth: int = 8
    time_s: float = 5.0


@dataclass(slots=True)
class Walk:
    """One walk through a tree.

    Attributes:
        notes: Why something was not seen, as sentences.
    """

    root: Path
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    notes: list[str] = field(default_factory=list)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _entries: int = 0
    _until_s: float = 0

    def files(self) -> Iterator[Path]:
        """Yield all files below the root by name, a link to a directory that was seen left out."""
        self._until_s = self.clock() + self.limits.time_s
        yield from self._below(self.root, 0)

    def _below(self, directory: Path, depth: int) -> Iterator[Path]:
        for path in self._names(directory):
            if self._is_spent():
                return
            if not os.path.isdir(path):  # noqa: PTH112 (Path.is_dir may raise)
                yield path
            elif depth < self.limits.depth:
                yield from self._below(path, depth + 1)
            else:
                self._note(f"{path} was not searched: more than {self.limits.depth} levels deep")

    def _names(self, directory: Path) -> list[Path]:
        try:
            found = directory.stat()
            if (found.st_dev, found.st_ino) in self._seen:
                return []
            self._seen.add((found.st_dev, found.st_ino))
            room = max(0, self.limits.entries - self._entries) + 1
            with os.scandir(directory) as entries:
                names = [entry.name for entry, _ in zip(entries, range(room), strict=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note(f"{directory} cannot be read: {error.strerror}")
            return []
        return [directory / name for name in sorted(names) if not name.startswith(_HIDDEN)]

    def _is_spent(self) -> bool:
        self._entries += 1
        if self._entries > self.limits.entries:
            self._note(f"{self.root}: the search ended after {self.limits.entries:,} files")
        elif self.clock() > self._until_s:
            self._note(f"{self.root}: the search ended after {self.limits.time_s:g} s")
        else:
            return False
        return True

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
