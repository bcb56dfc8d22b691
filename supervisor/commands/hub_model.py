"""Downloads a model of the hub into the Hugging Face cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from supervisor.commands import model_choice, transfer_meter
from supervisor.commands.model_choice import Chosen
from supervisor.commands.model_fit import MachineFit
from supervisor.commands.model_get import GetOptions
from supervisor.errors import AccessDenied, DownloadFailed
from supervisor.host.paths import Directories
from supervisor.hub import disk_space
from supervisor.hub.cache import HubCache
from supervisor.hub.client import HubClient
from supervisor.hub.file_names import FileGroup, FileKind
from supervisor.hub.reference import HubReference
from supervisor.hub.repository import RemoteFile, Repository
from supervisor.hub.session import cache_root, is_offline
from supervisor.hub.transfer import Transfer, fetch
from supervisor.output import CommandResult, size

_LEAVES_OUT = {FileKind.PROJECTOR: "--no-projector", FileKind.DRAFT: "--no-draft"}


@dataclass(frozen=True, slots=True)
class _Download:
    """What is fetched of a repository."""

    repository: Repository
    chosen: Chosen
    cache: HubCache

    @property
    def files(self) -> tuple[tuple[FileGroup, RemoteFile], ...]:
        return tuple(
            (group, self.repository.file(one))
            for group in self.chosen.groups
            for one in group.files
        )

    @property
    def missing(self) -> tuple[RemoteFile, ...]:
        return tuple(one for _, one in self.files if not self.cache.is_here(self.repository, one))

    @property
    def missing_bytes(self) -> int:
        parts = (self.cache.part_bytes(self.repository, one) for one in self.missing)
        return sum(one.size_bytes for one in self.missing) - sum(parts)

    @property
    def path(self) -> Path:
        return self.cache.path(self.repository, self.chosen.model.first.path)


def get_from_hub(wanted: HubReference, where: Directories, options: GetOptions) -> CommandResult:
    """Fetch a model into the Hugging Face cache; raises as model_get.get."""
    cache = HubCache(cache_root())
    try:
        if is_offline():
            return _offline(wanted, cache, options)
        return _fetched(wanted, where, cache, options)
    except OSError as error:
        raise AccessDenied(
            f"cannot use {error.filename or cache.root}: {error.strerror or error}",
            hint="make it readable and writable, or set HF_HOME to another directory",
        ) from error


def _fetched(
    wanted: HubReference, where: Directories, cache: HubCache, options: GetOptions
) -> CommandResult:
    with transfer_meter.meter(as_lines=options.as_lines) as meter:
        client = HubClient(notify=meter.note)
        repository = client.repository(wanted.repo, wanted.revision)
        here = MachineFit(where)
        chosen = model_choice.choose(repository, wanted, options.left_out, here, client)
        download = _Download(repository, chosen, cache)
        for line in _announcement(download):
            meter.note(line)
        if options.dry_run:
            return CommandResult(_data(download, 0))
        disk_space.check(cache.root, download.missing_bytes)
        received = sum(
            fetch(
                _transfer(download, one, client), client, partial(meter.show, one.path)
            ).received_bytes
            for one in download.missing
        )
        for _, one in download.files:
            cache.publish(repository, one)
    return _result(download, received)


def _offline(wanted: HubReference, cache: HubCache, options: GetOptions) -> CommandResult:
    repository = cache.local(wanted.repo, wanted.revision)
    if repository is None:
        raise DownloadFailed(
            f"offline mode is on, and nothing of {wanted.repo} is in {cache.root}",
            hint="unset HF_HUB_OFFLINE to fetch it",
        )
    chosen = model_choice.without_fit(repository, wanted, options.left_out)
    return _result(_Download(repository, chosen, cache), 0)


def _transfer(download: _Download, file: RemoteFile, client: HubClient) -> Transfer:
    repo, cache = download.repository.repo, download.cache
    return Transfer(
        name=file.path,
        url=client.file_url(download.repository, file.path),
        size_bytes=file.size_bytes,
        digest=file.digest,
        part=cache.part(repo, file.digest),
        target=cache.blob(repo, file.digest),
        lock=cache.lock(repo, file.digest),
    )


def _announcement(download: _Download) -> Iterator[str]:
    repository, chosen = download.repository, download.chosen
    shards = len(chosen.model.files)
    label = chosen.model.first.quantisation or chosen.model.first.path
    amount = size(repository.size_bytes(chosen.model))
    amount += f" in {shards} shards" if shards > 1 else ""
    yield f"{repository.repo}: {label}, {amount}: {chosen.reason}"
    for group in chosen.companions:
        name, kind = group.first.path, group.first.kind
        without = f"{_LEAVES_OUT[kind]} leaves it out"
        yield f"with its {kind} {name}, {size(repository.size_bytes(group))} ({without})"
    if chosen.warning:
        yield f"warning: {chosen.warning}"
    if parts := sum(download.cache.part_bytes(repository, one) for one in download.missing):
        yield f"{size(parts)} of it came earlier; {size(download.missing_bytes)} are to come"


def _result(download: _Download, received_bytes: int) -> CommandResult:
    is_model = download.chosen.model.first.kind is FileKind.MODEL
    notes = (f"corral start {_name(download)} serves it",) if is_model else ()
    return CommandResult(_data(download, received_bytes), str(download.path), notes)


def _name(download: _Download) -> str:
    """The name under which `corral start` finds it."""
    first = download.chosen.model.first
    return f"{download.repository.repo}:{first.quantisation or Path(first.prefix).name}"


def _data(download: _Download, received_bytes: int) -> dict[str, object]:
    repository, chosen = download.repository, download.chosen
    return {
        "name": _name(download),
        "path": str(download.path),
        "size_bytes": repository.size_bytes(chosen.model),
        "repository": repository.repo,
        "commit": repository.commit,
        "quantisation": chosen.model.first.quantisation,
        "reason": chosen.reason,
        "warning": chosen.warning,
        "received_bytes": received_bytes,
        "missing_bytes": download.missing_bytes,
        "files": [
            {
                "kind": group.first.kind,
                "path": str(download.cache.path(repository, file.path)),
                "size_bytes": file.size_bytes,
                "digest": file.digest,
            }
            for group, file in download.files
        ],
    }
