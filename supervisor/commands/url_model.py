"""Downloads the GGUF file of a URL into the directory of models."""

from __future__ import annotations

import hashlib
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
from supervisor.hub.transfer import Transfer, fetch
from supervisor.output import CommandResult, size


def get_from_url(wanted: UrlReference, where: Directories, options: GetOptions) -> CommandResult:
    """Fetch a file; raises as model_get.get.

    Nothing tells its digest, so its header is read first, and its SHA-256 is shown.
    """
    with transfer_meter.meter(as_lines=options.as_lines) as meter:
        client = HubClient(notify=meter.note)
        size_bytes, tag = client.describe(wanted.url, wanted.name)
        transfer = _transfer(wanted, where.models, size_bytes, tag)
        _check_target(transfer)
        for line in _announcement(wanted, size_bytes, MachineFit(where), client):
            meter.note(line)
        data: dict[str, object] = {
            "name": file_names.model_name(wanted.name),
            "path": str(transfer.target),
            "size_bytes": size_bytes,
        }
        if options.dry_run:
            return CommandResult(data)
        make_ours(where.models)
        disk_space.check(where.models, _missing_bytes(transfer))
        done = fetch(
            transfer,
            client,
            lambda stage, count, whole: meter.show(wanted.name, stage, count, whole),
        )
    data |= {"received_bytes": done.received_bytes, "sha256": done.sha256 or None}
    shown = (f"its SHA-256 is {done.sha256}",) if done.sha256 else ()
    return CommandResult(
        data, str(transfer.target), (*shown, f"corral start {data['name']} serves it")
    )


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
    wanted: UrlReference, size_bytes: int, here: MachineFit, client: HubClient
) -> list[str]:
    gguf = remote_header.read([RemotePart(wanted.url, wanted.name, size_bytes)], client)
    fit = here.of(gguf, 0)
    lines = [f"{wanted.name}: {gguf.quantisation}, {size(size_bytes)}: {fit.text}"]
    return lines + ([f"warning: it will not fit: {fit.misfit}"] if fit.misfit else [])


def _missing_bytes(transfer: Transfer) -> int:
    if transfer.target.exists():
        return 0
    part = transfer.part
    return transfer.size_bytes - (part.stat().st_size if part.exists() else 0)
