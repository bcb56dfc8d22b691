"""`corral batch run|list|show|cancel`: files of requests that the daemon computes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.commands.batch_client import BatchClient, Object
from supervisor.commands.batch_progress import wait
from supervisor.errors import AccessDenied, CorralError, DaemonBusy, Interrupted, NotRunning
from supervisor.host.files import open_regular
from supervisor.output import CommandResult, ProgressMeter, colored, table, write

_HEAD: Final = ("BATCH", "STATUS", "DONE", "FAILED", "LINES", "CREATED", "ENDPOINT")
# For a second Ctrl-C, which cancels.
_SECOND_S: Final = 2.0
_LINE_MAX_BYTES: Final = 64 * 1024**2
_EXAMPLE: Final = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}}'
)


def run(path: Path, output: Path | None) -> CommandResult:
    """Compute a file; exit code 0 only if every line was computed without an error."""
    endpoint = _endpoint(path)
    files = _files_of(output or path.with_suffix(".output.jsonl"))
    _check_new(files)
    with BatchClient() as client:
        batch = _created(client, path, endpoint)
        try:
            batch = wait(client, batch, ProgressMeter())
        except KeyboardInterrupt as interrupt:
            raise _interrupted(client, batch["id"]) from interrupt
        except (DaemonBusy, NotRunning) as error:
            again = f"corral start, then corral batch show {batch['id']}"
            hint = f"{batch['id']} goes on when the daemon runs again: {again}"
            raise DaemonBusy(error.message, hint=hint) from error
        return _result(batch, _download(client, batch, files))


def list_batches() -> CommandResult:
    with BatchClient() as client:
        found = client.list()
    rows = [_row(one) for one in found]
    text = table(_HEAD, rows) if rows else "no batches; corral batch run FILE.jsonl runs one"
    return CommandResult(found, text)


def show(batch_id: str, output: Path | None) -> CommandResult:
    """Show a batch, and with `output` write its results there."""
    files = _files_of(output) if output else None
    with BatchClient() as client:
        batch = client.get(batch_id)
        if files is None:
            return CommandResult(batch, _text(batch), tuple(_notes(batch)))
        _check_new(files)
        return _result(batch, _download(client, batch, files))


def cancel(batch_id: str) -> CommandResult:
    with BatchClient() as client:
        batch = client.cancel(batch_id)
    note = f"corral batch show {batch_id} shows what was computed until now"
    return CommandResult(batch, f"{batch_id} is {batch['status']}", (note,))


# A file and its results.


def _created(client: BatchClient, path: Path, endpoint: str) -> Object:
    try:
        uploaded = client.upload(path)
        return client.create(uploaded["id"], endpoint)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"stopped while {path} was sent", hint="corral batch list shows whether it runs"
        ) from interrupt


def _endpoint(path: Path) -> str:
    """The endpoint of a file's first line; the daemon checks all lines."""
    try:
        with open_regular(path) as file:
            lines = iter(lambda: file.readline(_LINE_MAX_BYTES), b"")
            line = next((one for one in lines if one.strip()), b"")
    except OSError as error:
        raise AccessDenied(f"cannot read {path}: {error.strerror}") from error
    try:
        url = json.loads(line.decode("utf-8-sig"))["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorralError(
            f"the first line of {path} is no request of a batch", hint=f"a line is {_EXAMPLE}"
        ) from error
    return str(url)


def _files_of(output: Path) -> tuple[Path, Path]:
    """Where results and errors are written."""
    name = output.name.removesuffix(".jsonl").removesuffix(".output")
    return output, output.with_name(f"{name}.errors.jsonl")


def _check_new(files: tuple[Path, Path]) -> None:
    for path in files:
        if os.path.lexists(path):
            raise AccessDenied(
                f"{path} exists already", hint="move it away, or name another file by --output"
            )
    parent = files[0].absolute().parent
    if not os.access(parent, os.W_OK):
        raise AccessDenied(f"cannot write to {parent}", hint="name a file by --output")


def _download(client: BatchClient, batch: Object, files: tuple[Path, Path]) -> list[Path]:
    written = []
    for name, path in zip(("output_file_id", "error_file_id"), files, strict=True):
        if file_id := batch[name]:
            client.download(file_id, path)
            written.append(path)
    return written


def _interrupted(client: BatchClient, batch_id: str) -> Interrupted:
    """After Ctrl-C the batch goes on; after a second one it is cancelled."""
    write(f"\n{batch_id} goes on; Ctrl-C again cancels it", sys.stderr)
    try:
        time.sleep(_SECOND_S)
    except KeyboardInterrupt:
        client.cancel(batch_id)
        return Interrupted(
            f"{batch_id} is cancelled",
            hint=f"corral batch show {batch_id} --output FILE.jsonl writes what was computed",
        )
    return Interrupted(
        f"stopped waiting; {batch_id} goes on",
        hint=f"corral batch show {batch_id} shows how far it is, "
        f"with --output FILE.jsonl it writes the results; corral batch cancel {batch_id} ends it",
    )


# What is shown.


def _result(batch: Object, written: list[Path]) -> CommandResult:
    is_success = batch["status"] == "completed" and not batch["request_counts"]["failed"]
    lines = [_text(batch), *(f"written: {path}" for path in written)]
    data = {**batch, "files": [str(path) for path in written]}
    notes = tuple(_notes(batch))
    return CommandResult(data, "\n".join(lines), notes, exit_code=0 if is_success else 1)


def _text(batch: Object) -> str:
    counts = batch["request_counts"]
    done = f"{counts['completed']} of {counts['total']} lines done, {counts['failed']} failed"
    style = {"completed": "green", "failed": "red", "expired": "red"}.get(batch["status"], "yellow")
    return f"{batch['id']}: {colored(batch['status'], style)}, {done}"


def _notes(batch: Object) -> Iterator[str]:
    if reason := batch.get("pause_reason"):
        yield f"it waits: {reason}"
    for error in (batch["errors"] or {"data": []})["data"]:
        where = f"line {error['line']}: " if error["line"] else ""
        yield f"{where}{error['message']}"


def _row(batch: Object) -> tuple[str, ...]:
    counts = batch["request_counts"]
    created = datetime.fromtimestamp(batch["created_at"], UTC).astimezone()
    status = f"{batch['status']}, waits" if batch.get("pause_reason") else batch["status"]
    return (
        *(batch["id"], status),
        *(str(counts[name]) for name in ("completed", "failed", "total")),
        *(f"{created:%Y-%m-%d %H:%M}", batch["endpoint"]),
    )
