"""The journal: a file beside the database, with rows that are not in it yet.

Rows are written at once, as a line of JSON: what is written outlives a `kill -9` of the process.
Every few seconds, one transaction adds the journal to the database and notes its name; then it is
deleted, while the next one is written. A process that is killed in between finds the note, and adds
no row twice. A line begins with the end of the line before and closes with its bracket, so a line
that was cut off is no JSON, and is dropped.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import orjson

from supervisor.records import older, requests, usage
from supervisor.records.requests import Row
from supervisor.records.usage import Account, Usage

FULL_BYTES: Final = 256 * 1024  # of some five hundred requests
# While the database cannot be written; further rows wait in memory.
_STOP_BYTES: Final = 32 * 1024**2
# In memory; further accounts are added to that of others.
_ACCOUNTS_MAX: Final = 4096
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Journal:
    """Writes rows at once; up to `held_max` that the disk does not take wait in memory.

    The rows of one call are one line. A row begins with the name of its table.

    Attributes:
        size_bytes: Of the present file.
        tables: Those of the rows that were written or held; the user clears them.
        dropped: How many rows were dropped: the oldest that were held.
    """

    def __init__(self, held_max: int) -> None:
        self.size_bytes = 0
        self.tables: set[str] = set()
        self.dropped = 0
        self._held_max = held_max
        self._lock = Lock()  # the event loop writes, and a thread goes on to the next file
        self._file: int | None = None
        self._rows: deque[Row] = deque()
        self._usage: dict[Account, Usage] = {}

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, *rows: Row) -> None:
        with self._lock:
            self._write(rows)

    def begin(self, file: int) -> None:
        """Continue in an empty file."""
        with self._lock:
            self.close()
            self._file, self.size_bytes = file, 0

    def write_held(self) -> bool:
        """Write what is held; return whether nothing is held any more."""
        with self._lock:
            rows, self._rows = self._rows, deque()
            rows.extend(("usage", *account, *used) for account, used in self._usage.items())
            self._usage = {}
            for row in rows:
                self._write((row,))
            return not (self._rows or self._usage)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, rows: Sequence[Row]) -> None:
        is_written = self._append(rows)
        for row in rows:
            self.tables.add(str(row[0]))
            if not is_written:
                self._hold(row)

    def _append(self, rows: Sequence[Row]) -> bool:
        if self._file is None or self.size_bytes > _STOP_BYTES:
            return False
        try:
            line = b"\n" + orjson.dumps(rows)
        except TypeError:  # a client's lone surrogate, or a number beyond 64 bits
            return True
        try:
            written = os.write(self._file, line)
        except OSError:
            return False
        self.size_bytes += written
        return written == len(line)

    def _hold(self, row: Row) -> None:
        if found := older.usage_row(row[1:]) if row[0] == "usage" else None:
            usage.hold(self._usage, *found, _ACCOUNTS_MAX)
            return
        self._rows.append(row)
        if len(self._rows) > self._held_max:
            self._rows.popleft()
            self.dropped += 1


def create(directory: Path) -> tuple[Path, int]:
    """Create a journal with a name of its own; return it and its descriptor. Raises OSError."""
    path = directory / f"journal.{time.time_ns()}.jsonl"
    return path, os.open(path, _FLAGS, 0o600)


def journals(directory: Path) -> list[Path]:
    """Return the journals in a directory, the oldest first."""
    return sorted(directory.glob("journal.*.jsonl"))


def take_over(connection: sqlite3.Connection, files: Iterable[Path]) -> None:
    """Add journals that are not noted yet; raises OSError."""
    noted = {row[0] for row in connection.execute("SELECT file FROM taken_over")}
    connection.execute("DELETE FROM taken_over WHERE file LIKE 'journal.%'")
    sums: dict[Account, Usage] = {}
    for path in files:
        connection.execute("INSERT INTO taken_over VALUES (?)", (path.name,))
        lines = older.read_lines(path) if path.name not in noted else ()
        for row in (row for rows in lines if isinstance(rows, list) for row in rows):
            match row:
                case ["usage", *values]:
                    if found := older.usage_row(values):
                        usage.hold(sums, *found, _ACCOUNTS_MAX)
                case [("requests" | "sizes") as table, *values]:
                    requests.insert(connection, table, *values)
    usage.add_usage(connection, sums)
