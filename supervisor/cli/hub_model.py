"""Downloads models from the hub or a URL: chooses the file that fits this machine, transfers it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

from supervisor.builds.discover import Engine
from supervisor.errors import AccessDenied, DownloadFailed, EngineBroken, EngineMissing, OutOfMemory
from supervisor.fleet.planner import LaunchPlanner
from supervisor.models import file_names
from supervisor.models import repository as repository_module
from supervisor.models import transfer as transfer_module
from supervisor.models.file_names import FileGroup, FileKind
from supervisor.models.hub import HubClient, cache_root, is_offline
from supervisor.models.local_stores import HubCache
from supervisor.models.metadata import Gguf
from supervisor.models.reference import HubReference, UrlReference
from supervisor.models.repository import RemoteFile, Repository
from supervisor.models.transfer import Transfer, fetch
from supervisor.output import CommandResult, TransferMeter, size
from supervisor.plan.fit import capacity, misfit_reason, need_text
from supervisor.plan.plan import make_plan
from supervisor.plan.resolve import ModelEntry
from supervisor.settings.load import load
from supervisor.system import files, machine
from supervisor.system.download import RemoteFile as DownloadFile
from supervisor.system.paths import Directories, make_ours

# A clause about the memory of a model, and why it can never fit, or None.
Fit = tuple[str, str | None]


class MachineFit:
    """This machine, with its engine and the memory that the settings allow for models."""

    def __init__(self, where: Directories) -> None:
        settings = load(config_dir=where.config).settings
        self._planner = LaunchPlanner(settings, where)
        self._budget_bytes = settings.supervisor.memory_budget
        self._engine: Engine | None = None
        with suppress(EngineMissing, EngineBroken):
            self._engine = self._planner.engine()
        devices = self._engine.devices if self._engine else ()
        self.room = capacity(machine.read(), devices, self._budget_bytes)

    def fit_of(self, model: Gguf, projector_bytes: int) -> Fit:
        """Plan a model under the default profile; raises SettingsInvalid."""
        if self._engine is None:
            size_bytes, most = model.size_bytes + projector_bytes, self.room.host
            misfit = f"its files take {size(size_bytes)}, but models may use {size(most)}"
            text = "no engine is installed, so only the size of its files was compared"
            return text, misfit if size_bytes > most else None
        entry = ModelEntry(file_names.model_name(model.path.name), model.path)
        profile = self._planner.profile(entry)
        here = machine.read()
        most_bytes = min(self._budget_bytes or here.memory_bytes, here.memory_bytes)
        here = replace(here, memory_bytes=most_bytes)
        plan = make_plan(
            entry, profile, self._engine, model, here, instances=1, projector_bytes=projector_bytes
        )
        return need_text(plan.estimate, self.room, plan.ctx_size), misfit_reason(
            plan.estimate, self.room
        )


_COMPANIONS: tuple[FileKind, ...] = ("projector", "draft")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The parts to fetch from a repository."""

    repository: Repository
    model: FileGroup  # or another part that was named by its file
    companions: tuple[FileGroup, ...] = ()  # its projector and its draft
    reason: str = ""  # a clause
    warning: str | None = None  # a sentence if the model does not fit

    @property
    def files(self) -> list[tuple[FileKind, RemoteFile]]:
        return [
            (group.first.kind, self.repository.file(file))
            for group in (self.model, *self.companions)
            for file in group.files
        ]

    @property
    def name(self) -> str:
        first = self.model.first
        return f"{self.repository.repo}:{first.quantisation or Path(first.prefix).name}"


def choose(
    repository: Repository,
    wanted: HubReference,
    left_out: Collection[str],
    here: MachineFit,
    client: HubClient,
) -> ModelChoice:
    """Choose by the names of files, and by the headers of models, which are requested.

    Raises NoSuchModel, OutOfMemory if no model fits, or as `transfer.read`.
    """

    def fit_of(model: FileGroup, others: tuple[FileGroup, ...]) -> Fit:
        parts = [
            DownloadFile(file.path, client.file_url(repository, file.path), file.size_bytes)
            for file in map(repository.file, model.files)
        ]
        projectors = [group for group in others if group.first.kind == "projector"]
        beside_bytes = sum(map(repository.size_bytes, projectors))
        return here.fit_of(transfer_module.read(parts, client), beside_bytes)

    if not (wanted.file or wanted.quantisation):
        return _choose_fitting(repository, left_out, here, fit_of)
    model = repository_module.choose_named(repository, wanted)
    others = companions(repository, model, left_out)
    if model.first.kind != "model":
        return ModelChoice(repository, model, others, "as named")
    text, misfit = fit_of(model, others)
    warning = f"it will not fit: {misfit}" if misfit else None
    return ModelChoice(repository, model, others, f"as named, {text}", warning)


def _choose_fitting(
    repository: Repository,
    left_out: Collection[str],
    here: MachineFit,
    fit_of: Callable[[FileGroup, tuple[FileGroup, ...]], Fit],
) -> ModelChoice:
    """Try the models in their order; skip models as large as another that does not fit."""
    # Memory that no model can exceed.
    most_bytes, tried = here.room.host + sum(here.room.devices.values()), ""
    misfit: str | None = None
    for model in repository_module.rank_models(repository):
        size_bytes = repository.size_bytes(model)
        if size_bytes >= most_bytes:
            continue
        others = companions(repository, model, left_out)
        text, misfit = fit_of(model, others)
        if misfit is None:
            reason = _reason(repository, model, text, tried)
            return ModelChoice(repository, model, others, reason)
        most_bytes = size_bytes
        tried = tried or f"{model.first.quantisation} can never fit: {misfit}"
    least = min(repository_module.models(repository), key=repository.size_bytes)
    amount, most = size(repository.size_bytes(least)), size(here.room.host)
    name = least.first.quantisation or least.first.path
    why = misfit or f"the smallest, {name}, takes {amount}, and models may use {most}"
    raise OutOfMemory(
        f"no model of {repository.repo} fits this machine: {why}",
        hint=f"choose a smaller model; {repository.repo}:{name} fetches it anyway",
    )


def companions(
    repository: Repository, model: FileGroup, left_out: Collection[str]
) -> tuple[FileGroup, ...]:
    """Return the projector and the draft of a model; another part has no companions."""
    if model.first.kind != "model":
        return ()
    kinds = (kind for kind in _COMPANIONS if kind not in left_out)
    found = (file_names.companion(repository.groups, model.first, kind) for kind in kinds)
    most_bytes = repository.size_bytes(model)
    return tuple(group for group in found if group and repository.size_bytes(group) < most_bytes)


def _reason(repository: Repository, model: FileGroup, fit: str, tried: str) -> str:
    if tried:
        return f"{fit}; {tried}"
    is_small = repository.size_bytes(model) <= repository_module.EIGHT_BITS_MAX_BYTES
    if model.first.quantisation == "Q8_0" and is_small:
        return f"small enough for 8 bits, {fit}"
    return fit


_LEAVES_OUT = {"projector": "--no-projector", "draft": "--no-draft"}


def get_from_hub(
    wanted: HubReference,
    where: Directories,
    left_out: Collection[str],
    meter: TransferMeter,
    *,
    dry_run: bool,
) -> CommandResult:
    """Fetch a model into the Hugging Face cache; raises as `model.get`."""
    cache = HubCache(cache_root())
    try:
        if is_offline():
            return _find_cached_model(wanted, cache, left_out)
        with meter:
            client = HubClient(notify=meter.note)
            repository = client.repository(wanted.repo, wanted.revision)
            chosen = choose(repository, wanted, left_out, MachineFit(where), client)
            missing = [file for _, file in chosen.files if not cache.is_here(repository, file)]
            here_bytes = sum(cache.part_bytes(repository, file) for file in missing)
            missing_bytes = sum(file.size_bytes for file in missing) - here_bytes
            for line in _hub_announcement(chosen, here_bytes, missing_bytes):
                meter.note(line)
            if dry_run:
                return CommandResult(_hub_data(chosen, cache, 0, missing_bytes))
            _check_space(cache.root, missing_bytes)
            received_bytes = 0
            for file in missing:
                transfer = _hub_transfer(repository, file, cache, client)
                received_bytes += fetch(transfer, client, partial(meter.show, file.path))[0]
            for _, file in chosen.files:
                cache.publish(repository, file)
    except OSError as error:
        raise AccessDenied(
            f"cannot use {error.filename or cache.root}: {error.strerror or error}",
            hint="make it readable and writable, or set HF_HOME to another directory",
        ) from error
    return _result(chosen, cache, received_bytes)


def _find_cached_model(
    wanted: HubReference, cache: HubCache, left_out: Collection[str]
) -> CommandResult:
    repository = cache.local(wanted.repo, wanted.revision)
    if repository is None:
        raise DownloadFailed(
            f"offline mode is on, and nothing of {wanted.repo} is in {cache.root}",
            hint="unset HF_HUB_OFFLINE to fetch it",
        )
    if wanted.file or wanted.quantisation:
        model = repository_module.choose_named(repository, wanted)
    else:
        model = repository_module.rank_models(repository)[0]
    others = companions(repository, model, left_out)
    return _result(ModelChoice(repository, model, others, "it is here"), cache, 0)


def _check_space(directory: Path, missing_bytes: int) -> None:
    hint = "free some space, choose a smaller quantisation, or set another directory: "
    hint += "HF_HOME for models of the hub, CORRAL_DATA_DIR for others"
    files.check_space(directory, missing_bytes, "the files take", hint)


def _hub_transfer(
    repository: Repository, file: RemoteFile, cache: HubCache, client: HubClient
) -> Transfer:
    repo = repository.repo
    return Transfer(
        name=file.path,
        url=client.file_url(repository, file.path),
        size_bytes=file.size_bytes,
        digest=file.digest,
        part=cache.part(repo, file.digest),
        target=cache.blob(repo, file.digest),
        lock=cache.lock(repo, file.digest),
    )


def _hub_announcement(chosen: ModelChoice, here_bytes: int, missing_bytes: int) -> Iterator[str]:
    repository, shards = chosen.repository, len(chosen.model.files)
    label = chosen.model.first.quantisation or chosen.model.first.path
    amount = size(repository.size_bytes(chosen.model))
    amount += f" in {shards} shards" if shards > 1 else ""
    yield f"{repository.repo}: {label}, {amount}: {chosen.reason}"
    for group in chosen.companions:
        name, kind = group.first.path, group.first.kind
        amount = size(repository.size_bytes(group))
        yield f"with its {kind} {name}, {amount} (--no-{kind} leaves it out)"
    if chosen.warning:
        yield f"warning: {chosen.warning}"
    if here_bytes:
        yield f"{size(here_bytes)} of it is here already; {size(missing_bytes)} is missing"


def _result(chosen: ModelChoice, cache: HubCache, received_bytes: int) -> CommandResult:
    data = _hub_data(chosen, cache, received_bytes, 0)
    is_model = chosen.model.first.kind == "model"
    notes = (f"corral start {chosen.name} serves it",) if is_model else ()
    return CommandResult(data, str(data["path"]), notes)


def _hub_data(
    chosen: ModelChoice, cache: HubCache, received_bytes: int, missing_bytes: int
) -> dict[str, object]:
    repository, first = chosen.repository, chosen.model.first
    return {
        "name": chosen.name,
        "path": str(cache.path(repository, first.path)),
        "size_bytes": repository.size_bytes(chosen.model),
        "repository": repository.repo,
        "commit": repository.commit,
        "quantisation": first.quantisation,
        "reason": chosen.reason,
        "warning": chosen.warning,
        "received_bytes": received_bytes,
        "missing_bytes": missing_bytes,
        "files": [
            {
                "kind": kind,
                "path": str(cache.path(repository, file.path)),
                "size_bytes": file.size_bytes,
                "digest": file.digest,
            }
            for kind, file in chosen.files
        ],
    }


def get_from_url(
    wanted: UrlReference, where: Directories, meter: TransferMeter, *, dry_run: bool
) -> CommandResult:
    """Fetch a file, or all shards of a model; raises as `model.get`.

    A URL has no digest, so the headers are read first, and the SHA-256 of each file is shown.
    """
    with meter:
        client = HubClient(notify=meter.note)
        transfers = [_url_transfer(shard, where.models, client) for shard in wanted.shards]
        for line in _url_announcement(transfers, MachineFit(where), client):
            meter.note(line)
        if dry_run:
            return CommandResult(_url_data(transfers, []))
        make_ours(where.models)
        _check_space(where.models, sum(map(_missing_bytes, transfers)))
        done = [fetch(file, client, partial(meter.show, file.name)) for file in transfers]
    data, first = _url_data(transfers, done), transfers[0]
    pairs = zip(transfers, done, strict=True)
    notes = [f"the SHA-256 of {to.name} is {digest}" for to, (_, digest) in pairs if digest]
    notes.append(f"corral start {data['name']} serves it")
    return CommandResult(data, str(first.target), tuple(notes))


def _url_data(transfers: Sequence[Transfer], done: Sequence[tuple[int, str]]) -> dict[str, object]:
    first = transfers[0]
    return {
        "name": file_names.model_name(first.name),
        "path": str(first.target),
        "size_bytes": sum(transfer.size_bytes for transfer in transfers),
        "received_bytes": sum(received_bytes for received_bytes, _ in done),
        "files": [
            {"path": str(transfer.target), "size_bytes": transfer.size_bytes, "sha256": digest}
            for transfer, digest in zip_longest(transfers, (digest or None for _, digest in done))
        ],
    }


def _url_transfer(wanted: UrlReference, models: Path, client: HubClient) -> Transfer:
    """Ask for the size of a file; raises DownloadFailed if another file has its name."""
    size_bytes, tag = client.describe(wanted.url, wanted.name)
    target = models / wanted.name
    if target.exists() and target.stat().st_size != size_bytes:
        raise DownloadFailed(
            f"{target} exists already, and its size differs from the file of the URL",
            hint="remove or rename it, then run the same command again",
        )
    # A partial download of another version of the file is not continued.
    version = hashlib.sha256(f"{wanted.url} {tag}".encode()).hexdigest()[:8]
    return Transfer(
        name=wanted.name,
        url=wanted.url,
        size_bytes=size_bytes,
        digest="",
        part=models / f".{wanted.name}.{version}.part",
        target=target,
        lock=models / f".{wanted.name}.lock",
        tag=tag,
    )


def _url_announcement(
    transfers: Sequence[Transfer], here: MachineFit, client: HubClient
) -> Iterator[str]:
    gguf = transfer_module.read(transfers, client)
    (fit, misfit), shards = here.fit_of(gguf, 0), len(transfers)
    amount = size(gguf.size_bytes) + (f" in {shards} shards" if shards > 1 else "")
    yield f"{transfers[0].name}: {gguf.quantisation}, {amount}: {fit}"
    if misfit:
        yield f"warning: it will not fit: {misfit}"


def _missing_bytes(transfer: Transfer) -> int:
    if transfer.target.exists():
        return 0
    part = transfer.part
    return transfer.size_bytes - (part.stat().st_size if part.exists() else 0)
