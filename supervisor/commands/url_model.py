"""Downloads GGUF files of URLs into the directory of models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

from supervisor.commands import transfer_meter
from supervisor.commands.model_fit import MachineFit
from supervisor.commands.model_get import GetOptions
from supervisor.errors import DownloadFailed
from supervisor.host.paths import Directories, make_ours
from supervisor.hub import disk_space, file_names, remote_header
from supervisor.hub.client import HubClient
from supervisor.hub.reference import UrlReference
from supervisor.hub.remote_header import RemotePart
from supervisor.hub.transfer import Fetched, Transfer, fetch
from supervisor.output import CommandResult, size


def get_from_url(wanted: UrlReference, where: Directories, options: GetOptions) -> CommandResult:
    """Fetch a file, or all shards of a model; raises as model_get.get.

    Nothing tells their digests, so their headers are read first, and each SHA-256 is shown.
    """
    with transfer_meter.meter(as_lines=options.as_lines) as meter:
        client = HubClient(notify=meter.note)
        transfers = [_described(one, where.models, client) for one in wanted.shards]
        for line in _announcement(transfers, MachineFit(where), client):
            meter.note(line)
        if options.dry_run:
            return CommandResult(_data(transfers, []))
        make_ours(where.models)
        disk_space.check(where.models, sum(map(_missing_bytes, transfers)))
        done = [fetch(one, client, partial(meter.show, one.name)) for one in transfers]
    data, first = _data(transfers, done), transfers[0]
    shown = [
        f"the SHA-256 of {one.name} is {fetched.sha256}"
        for one, fetched in zip(transfers, done, strict=True)
        if fetched.sha256
    ]
    return CommandResult(
        data, str(first.target), (*shown, f"corral start {data['name']} serves it")
    )


def _data(transfers: Sequence[Transfer], done: Sequence[Fetched]) -> dict[str, object]:
    first = transfers[0]
    return {
        "name": file_names.model_name(first.name),
        "path": str(first.target),
        "size_bytes": sum(one.size_bytes for one in transfers),
        "received_bytes": sum(one.received_bytes for one in done),
        "files": [
            {"path": str(one.target), "size_bytes": one.size_bytes, "sha256": digest}
            for one, digest in zip_longest(transfers, (one.sha256 or None for one in done))
        ],
    }


def _described(wanted: UrlReference, models: Path, client: HubClient) -> Transfer:
    """Ask for the size of a file; raises DownloadFailed where another file has its name."""
    size_bytes, tag = client.describe(wanted.url, wanted.name)
    transfer = _transfer(wanted, models, size_bytes, tag)
    _check_target(transfer)
    return transfer


def _transfer(wanted: UrlReference, models: Path, size_bytes: int, tag: str) -> Transfer:
    # A part of another version of the file is not continued.
    version = hashlib.sha256(f"{wanted.url} {tag}".encode()).hexdigest()[:8]
    return Transfer(
        name=wanted.name,
        url=wanted.url,
        size_bytes=size_bytes,
        digest="",
        part=models / f".{wanted.name}.{version}.part",
        target=models / wanted.name,
        lock=models / f".{wanted.name}.lock",
        tag=tag,
    )


def _check_target(transfer: Transfer) -> None:
    target = transfer.target
    if target.exists() and target.stat().st_size != transfer.size_bytes:
        raise DownloadFailed(
            f"{target} is there already, and has another size than the file of the URL",
            hint="remove or rename it, then run the same command again",
        )


def _announcement(
    transfers: Sequence[Transfer], here: MachineFit, client: HubClient
) -> Iterator[str]:
    parts = [RemotePart(one.url, one.name, one.size_bytes) for one in transfers]
    gguf = remote_header.read(parts, client)
    fit, shards = here.of(gguf, 0), len(transfers)
    amount = size(gguf.size_bytes) + (f" in {shards} shards" if shards > 1 else "")
    yield f"{transfers[0].name}: {gguf.quantisation}, {amount}: {fit.text}"
    if fit.misfit:
        yield f"warning: it will not fit: {fit.misfit}"


def _missing_bytes(transfer: Transfer) -> int:
    if transfer.target.exists():
        return 0
    part = transfer.part
    return transfer.size_bytes - (part.stat().st_size if part.exists() else 0)
