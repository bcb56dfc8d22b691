"""How many layers of a split model each worker gets, as `corral balance --apply` left it.

One file for each model, which also has what they were before. It is not used once the model has
other workers or another number of layers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from supervisor.errors import AccessDenied
from supervisor.host import json_cache
from supervisor.host.files import write_atomic
from supervisor.host.paths import file_name, make_private


class LayerShares:
    """The files in a directory, which is made when something is written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def layers(self, model: str, workers: Collection[str], layers: int) -> dict[str, int] | None:
        """Return the layers by worker of a model that has this many; None if not usable."""
        return self._usable("layers", model, workers, layers)

    def before(self, model: str, workers: Collection[str], layers: int) -> dict[str, int] | None:
        """Return likewise those before they were moved last."""
        return self._usable("before", model, workers, layers)

    def _usable(
        self, member: str, model: str, workers: Collection[str], layers: int
    ) -> dict[str, int] | None:
        found = _counts(json_cache.get(self._root, file_name(model)), member)
        is_usable = found.keys() == set(workers) and sum(found.values()) == layers
        return found if is_usable else None

    def write(self, model: str, layers: Mapping[str, int], before: Mapping[str, int]) -> Path:
        """Replace a model's file; raises AccessDenied."""
        path = make_private(self._root) / f"{file_name(model)}.json"
        try:
            write_atomic(path, json.dumps({"layers": dict(layers), "before": dict(before)}))
        except OSError as error:
            raise AccessDenied(f"cannot write {path}: {error.strerror}") from error
        return path


def _counts(found: Mapping[str, Any] | None, member: str) -> dict[str, int]:
    """Return layers by worker; empty where a file says something else."""
    layers = found.get(member) if found else None
    if not isinstance(layers, dict):
        return {}
    counts = {name: count for name, count in layers.items() if type(count) is int and count > 0}
    return counts if len(counts) == len(layers) else {}
