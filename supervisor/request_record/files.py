"""The record of each model: two files of JSON lines, the newer and the older. For this user alone.

A file is opened for each batch, so that one that was deleted is created again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from supervisor.host.files import open_regular
from supervisor.host.paths import file_name, is_ours, make_private, name_of_file
from supervisor.request_record.recorded_request import RecordedRequest

# About 6 000 requests; a model has up to two such files.
_FILE_BYTES: Final = 1024**2
_NEWER, _OLDER = "requests.jsonl", "requests.1.jsonl"
_FLAGS: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)


class RecordFiles:
    """The files below `root`, which is made when something is recorded."""

    def __init__(self, root: Path, *, file_bytes: int = _FILE_BYTES) -> None:
        self._root = root
        self._file_bytes = file_bytes

    def append(self, model: str, requests: Sequence[RecordedRequest]) -> None:
        """Append requests of a model.

        Raises:
            OSError: Not all of them were written; a line that was cut off is skipped when read.
            AccessDenied: The directory cannot be used.
        """
        newer, older = self._paths(model)
        make_private(self._root)
        make_private(newer.parent)
        descriptor = os.open(newer, _FLAGS, 0o600)
        try:
            written_bytes = os.fstat(descriptor).st_size
            # An earlier line may have been cut off by a full disk.
            _write(descriptor, b"\n" * bool(written_bytes) + b"".join(one.line for one in requests))
            is_full = os.fstat(descriptor).st_size >= self._file_bytes
        finally:
            os.close(descriptor)
        if is_full:
            newer.replace(older)

    def requests(self, model: str) -> list[RecordedRequest]:
        """Return what is recorded of a model, the oldest first; raises OSError."""
        newer, older = self._paths(model)
        return [*_read(older), *_read(newer)]

    def counts(self) -> dict[str, int]:
        """Return the number of requests of each model that has any."""
        counts = {model: len(self.requests(model)) for model in self._models()}
        return {model: count for model, count in counts.items() if count}

    def forget(self, model: str | None = None) -> dict[str, int]:
        """Delete the record of a model, or of all; return the number of requests of each."""
        counts = {
            name: len(self.requests(name)) for name in self._models() if model in {None, name}
        }
        for name in counts:
            for path in self._paths(name):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the daemon writes to it again
                self._directory(name).rmdir()
        return counts

    def _paths(self, model: str) -> tuple[Path, Path]:
        directory = self._directory(model)
        return directory / _NEWER, directory / _OLDER

    def _directory(self, model: str) -> Path:
        return self._root / file_name(model)

    def _models(self) -> list[str]:
        if not is_ours(self._root):
            return []
        return sorted(name_of_file(path.name) for path in self._root.iterdir() if path.is_dir())


def _write(descriptor: int, lines: bytes) -> None:
    view = memoryview(lines)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(path: Path) -> Iterator[RecordedRequest]:
    try:
        with open_regular(path) as file:
            lines = file.read(2 * _FILE_BYTES).splitlines()
    except FileNotFoundError:
        return
    yield from filter(None, map(RecordedRequest.read, lines))
