"""Remembers for which caches an engine did not use restored slots.

The file beside the slot store is read at every use, so a command may delete an entry that the
daemon wrote. An unreadable file counts as empty.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from supervisor.host import json_cache
from supervisor.slot_store.manifest import CacheKey

_ENTRIES_MAX: Final = 64
_NAME: Final = "ineffective"


class IneffectiveRestores:
    """The latest 64 cache keys for which nothing is restored any more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __contains__(self, key: CacheKey) -> bool:
        return _digest(key) in self._read()

    def add(self, model: str, key: CacheKey) -> None:
        """Add a key under the model's name; a full disk is not an error."""
        models = self._read()
        models.pop(digest := _digest(key), None)
        self._write({**models, digest: model})

    def forget(self, model: str | None = None) -> None:
        """Delete the keys of a model, or all."""
        models = self._read()
        self._write({digest: name for digest, name in models.items() if model not in {None, name}})

    def _read(self) -> dict[str, str]:
        """Return the names of models by digest, oldest first."""
        found = json_cache.get(self._directory, _NAME) or {}
        return found if all(isinstance(name, str) for name in found.values()) else {}

    def _write(self, models: dict[str, str]) -> None:
        if models:
            json_cache.put(self._directory, _NAME, dict(list(models.items())[-_ENTRIES_MAX:]))
        else:
            (self._directory / f"{_NAME}.json").unlink(missing_ok=True)


def _digest(key: CacheKey) -> str:
    return hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
