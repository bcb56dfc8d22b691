"""Which installed build is in use, and which were before it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from supervisor.engines.installed import build_number
from supervisor.host.files import open_regular, write_atomic

_FILE: Final = "in_use.json"
_FILE_MAX_BYTES: Final = 1 << 16
_PREVIOUS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class InUse:
    """The name of the build in use, and of those before it, the last one last.

    None stands for no installed build: the engine is then found elsewhere.
    """

    current: str | None = None
    previous: tuple[str | None, ...] = ()

    def using(self, name: str) -> InUse:
        """Return what holds when another build is used."""
        if name == self.current:
            return self
        return InUse(name, (*self.previous, self.current)[-_PREVIOUS_MAX:])

    def rolled_back(self, installed: frozenset[str]) -> InUse | None:
        """Return what holds with the build before this one that is still installed; None if none.

        Where none of them is, but once no build was in use, none is again.
        """
        for count in range(len(self.previous), 0, -1):
            name = self.previous[count - 1]
            if name != self.current and (name is None or name in installed):
                return InUse(name, self.previous[: count - 1])
        return None


def read_in_use(engines_dir: Path) -> InUse:
    """Return what is in use; nothing where no build was ever used."""
    try:
        with open_regular(engines_dir / _FILE) as file:
            found = json.loads(file.read(_FILE_MAX_BYTES))
        names = [found["current"], *found["previous"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return InUse()
    if not all(one is None or (isinstance(one, str) and build_number(one)) for one in names):
        return InUse()
    return InUse(names[0], tuple(names[1:]))


def write_in_use(engines_dir: Path, in_use: InUse) -> None:
    """Note what is in use.

    Raises:
        OSError: The directory cannot be written.
    """
    write_atomic(engines_dir / _FILE, json.dumps(asdict(in_use)))
