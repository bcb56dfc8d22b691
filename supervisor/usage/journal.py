"""The journal that a daemon writes: one small write for each request that ended.

It is not synced: what was written survives the process, and a crash of the machine may lose the
last of it. What cannot be written, as on a full disk, is held in memory and written later.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import filelock
import orjson

from supervisor.errors import AccessDenied
from supervisor.host.paths import make_private
from supervisor.usage.files import fold, journal_path, next_journal
from supervisor.usage.usage import Account, Usage, add, row

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD_MAX: Final = 4096
# Some thousand requests; then it is folded.
_FULL_BYTES: Final = 1024**2
_STOP_BYTES: Final = 32 * _FULL_BYTES


class Journal:
    """The only writer below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = filelock.FileLock(root / "lock", timeout=0, mode=0o600, thread_local=False)
        self._number = 0
        self._file: int | None = None
        self._size_bytes = 0
        self._is_torn = False
        self._held: dict[Account, Usage] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is to be folded soon."""
        return self._size_bytes >= _FULL_BYTES

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def is_empty(self) -> bool:
        return not (self._size_bytes or self._held)

    def write(self, account: Account, usage: Usage) -> str | None:
        """Write one line, at once; return why it is only held in memory, or None."""
        add(self._held, account, usage, _HELD_MAX)
        if self._file is None or self._size_bytes > _STOP_BYTES:
            return None if self._file is None else "it is full"
        try:
            self._write_held(self._file)
        except OSError as error:
            return error.strerror or str(error)
        return "the disk is full" if self._held else None

    def open_next(self) -> tuple[int, int]:
        """Create the next file, for a thread; return its number and a descriptor.

        Raises:
            OSError: It cannot be created.
            AccessDenied: The directory cannot be used, or another daemon uses it.
        """
        make_private(self._root)
        try:
            if not self._lock.is_locked:
                self._lock.acquire()
        except filelock.Timeout as error:
            raise AccessDenied(f"another daemon records its usage in {self._root}") from error
        number = max(next_journal(self._root), self._number + 1)
        return number, os.open(journal_path(self._root, number), _FLAGS, 0o600)

    def begin(self, number: int, file: int) -> None:
        """Go on in the next file; not in a thread, because `write` may use the last."""
        before, self._file = self._file, file
        self._number, self._size_bytes, self._is_torn = number, 0, False
        if before is not None:
            os.close(before)
        with suppress(OSError):  # the next write tells
            self._write_held(file)

    def fold(self) -> list[str]:
        """Count all files before the present one; raises as `files.fold`."""
        return fold(self._root, self._number)

    def close(self) -> None:
        """Count what was written, and give the directory back; what fails is counted later."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with suppress(OSError, ValueError):
                fold(self._root, self._number + 1)
        self._lock.release()

    def _write_held(self, file: int) -> None:
        for account, usage in list(self._held.items()):
            line = orjson.dumps(row(account, usage))
            written = os.write(file, b"\n" * self._is_torn + line + b"\n") - self._is_torn
            self._size_bytes += written
            # A row is complete without the end of its line.
            self._is_torn = written <= len(line)
            if written < len(line):
                return
            del self._held[account]
