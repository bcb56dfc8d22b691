"""`corral model list`: the models on this machine, and the space that they take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from supervisor.commands.stored_models import StoredModels
from supervisor.host import download
from supervisor.host.paths import directories
from supervisor.model_stores.roots import Root
from supervisor.model_stores.stored_model import STORES, StoredModel
from supervisor.output import CommandResult, size, table
from supervisor.settings.load import load

_HEAD = ("NAME", "STORE", "KIND", "QUANT", "SIZE", "STATE")
_SPACE_HEAD = ("STORE", "MODELS", "SIZE", "DIRECTORY")


def list_models(config: Path | None) -> CommandResult:
    where = directories()
    stored = StoredModels(load(config, config_dir=where.config).settings, where)
    models = stored.catalogue.models
    missing = [
        pin for pin in download.pins().values() if not download.is_fetched(pin, where.models)
    ]
    space, disks = _space(models, stored.places), _disks(stored.places)
    rows = [
        *map(_row, models),
        *((pin.name, "-", "", "", size(pin.size_bytes), "not fetched") for pin in missing),
    ]
    text = "\n".join(
        [
            table(_HEAD, rows),
            "",
            table(_SPACE_HEAD, [_space_row(one) for one in space]),
            *(f"{size(disk['free_bytes'])} free of {disk['path']}" for disk in disks),
        ]
    )
    data = {
        "models": [_data(model) for model in models],
        "pinned": [
            {**asdict(pin), "path": str(pin.path(where.models)), "fetched": pin not in missing}
            for pin in download.pins().values()
        ],
        "stores": space,
        "disks": disks,
    }
    return CommandResult(data, text, stored.catalogue.notes)


def _row(model: StoredModel) -> tuple[str, ...]:
    media = " + images" if model.projector else ""
    state = f"broken: {model.problem}" if model.problem else "ok"
    shown = size(model.size_bytes)
    return model.name, model.store, model.kind + media, model.quantisation, shown, state


def _data(model: StoredModel) -> dict[str, Any]:
    return {**asdict(model), "id": model.id}


def _space(models: Iterable[StoredModel], places: Iterable[Root]) -> list[dict[str, Any]]:
    """Return the bytes of each store; a file that two models have counts once."""
    found = []
    for store in sorted({root.store for root in places}, key=STORES.index):
        own = [model for model in models if model.store == store]
        files = {Path(os.path.realpath(path)) for model in own for path in _files(model)}
        paths = [str(root.path) for root in places if root.store == store and root.path.is_dir()]
        total = sum(path.stat().st_size for path in files if path.is_file())
        if own or paths:
            found.append(
                {"store": store, "models": len(own), "size_bytes": total, "directories": paths}
            )
    return found


def _files(model: StoredModel) -> Iterator[Path]:
    yield from model.files or (model.path,)
    yield from model.adapters
    if model.projector:
        yield model.projector


def _space_row(found: dict[str, Any]) -> tuple[str, ...]:
    shown = size(found["size_bytes"])
    return found["store"], str(found["models"]), shown, ", ".join(found["directories"])


def _disks(places: Iterable[Root]) -> list[dict[str, Any]]:
    """Return the free space of each file system that holds a store."""
    found: dict[int, dict[str, Any]] = {}
    for root in places:
        try:
            device = root.path.stat().st_dev
            usage = shutil.disk_usage(root.path)
        except OSError:
            continue
        entry = {"path": str(root.path), "free_bytes": usage.free, "total_bytes": usage.total}
        found.setdefault(device, entry)
    return list(found.values())
