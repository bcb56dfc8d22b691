"""Remembers what an engine did with the first slot that it restored.

An outcome belongs to a cache key without its number of slots: a model, a build, and the options
that matter to a cache. So another build or option is tried again.

The file beside the slot store is read at every use, so a command may delete an entry that the
daemon wrote. An unreadable file counts as empty.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.host import json_cache
from supervisor.slot_store.manifest import CacheKey

_ENTRIES_MAX: Final = 64
_NAME: Final = "outcomes"


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What became of the first restored slot."""

    model: str  # its name in the settings
    expected_tokens: int = 0  # that the slot held
    found_tokens: int = 0  # of those, what the engine used
    problem: str = ""  # a clause; empty where restored slots are used


class RestoreOutcomes:
    """The latest 64 outcomes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: CacheKey) -> RestoreOutcome | None:
        """Return what became of the first restore; None if none was tried."""
        found = self._read().get(_digest(key))
        try:
            return RestoreOutcome(**found) if found else None
        except TypeError:
            return None

    def set(self, key: CacheKey, outcome: RestoreOutcome) -> None:
        """Keep an outcome; a full disk is not an error."""
        entries = self._read()
        entries.pop(digest := _digest(key), None)
        self._write({**entries, digest: asdict(outcome)})

    def forget(self, model: str | None = None) -> None:
        """Delete the outcomes of a model, or all."""
        kept = {
            digest: one
            for digest, one in self._read().items()
            if model not in {None, one.get("model")}
        }
        self._write(kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the entries by digest, oldest first."""
        found = json_cache.get(self._directory, _NAME) or {}
        return found if all(isinstance(one, dict) for one in found.values()) else {}

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        if entries:
            json_cache.put(self._directory, _NAME, dict(list(entries.items())[-_ENTRIES_MAX:]))
        else:
            (self._directory / f"{_NAME}.json").unlink(missing_ok=True)


def _digest(key: CacheKey) -> str:
    text = json.dumps(asdict(key.without_slots), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
