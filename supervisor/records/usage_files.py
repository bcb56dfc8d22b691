"""Usage on disk: one file for each month, and a journal of what the months do not count yet.

A journal is a file of JSON lines, one for each ended request. Folding adds it to the files of its
months and deletes it. Each month is replaced atomically and names the last journal that it counts,
so a journal is counted once even if the process is killed.

A daemon makes one small write for each ended request. It is not synced: written lines survive the
process, but a crash of the machine may lose the last ones. Lines that cannot be written, as on a
full disk, are held in memory and written later.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import filelock
import orjson

from supervisor.errors import AccessDenied
from supervisor.records.usage import Account, Totals, Usage, add, from_row, from_rows, row
from supervisor.system.files import open_regular, write_atomic
from supervisor.system.paths import make_private

_JOURNAL: Final = re.compile(r"journal\.(\d{1,12})\.jsonl")
_MONTH: Final = re.compile(r"\d{4}-\d\d")
_READ_MAX_BYTES: Final = 64 * 1024**2  # of a month
_LINE_MAX_BYTES: Final = 64 * 1024
# Some hundred keys and models each day.
_ROWS_MAX: Final = 50_000
_MONTHS_MAX: Final = 60
_DAMAGED: Final = ".damaged"


@dataclass(frozen=True, slots=True)
class Month:
    """The file of one month; `folded` is the number of the last journal that it counts."""

    """The file of one month; `folded` is the number of the last journal that it counts."""

    folded: int = 0
    totals: Totals = field(default_factory=dict)


def journal_path(root: Path, number: int) -> Path:
    return root / f"journal.{number}.jsonl"


def next_journal(root: Path) -> int:
    """Return a number above all journals that exist or were counted; raises OSError."""
    return max((*_journals(root), *map(_read_folded, _months(root).values())), default=0) + 1


def fold(root: Path, before: int) -> list[str]:
    """Count all journals before a number and delete them; return the names of damaged files.

    OSError leaves some uncounted; the others were counted once.
    """
    damaged = _set_damaged_files_aside(root)
    for number, path in sorted(_journals(root).items()):
        if number < before:
            for month, totals in _journal_totals(path).items():
                _count(root / f"{month}.json", number, totals)
            path.unlink()
    for path in sorted(_months(root).values())[:-_MONTHS_MAX]:
        path.unlink()
    return damaged


def read_all(root: Path) -> dict[Account, Usage]:
    """Return all usage, including journals, even while a daemon writes; raises OSError."""
    # Months are read after journals, so a journal that is folded meanwhile is not missed.
    journals = {number: _journal_totals(path) for number, path in _journals(root).items()}
    totals: dict[Account, Usage] = {}
    folded: dict[str, int] = {}
    for month, path in _months(root).items():
        with suppress(ValueError):
            found = _read_month(path)
            totals |= found.totals
            folded[month] = found.folded
    for number, months in sorted(journals.items()):
        for month, found_there in months.items():
            if number > folded.get(month, 0):
                for account, usage in found_there.items():
                    add(totals, account, usage, len(totals) + 1)
    return totals


def _count(path: Path, number: int, found: Totals) -> None:
    month = _read_month(path)
    if month.folded >= number:
        return
    totals = dict(month.totals)
    for account, usage in found.items():
        add(totals, account, usage, _ROWS_MAX)
    content = {"folded": number, "rows": [row(*item) for item in sorted(totals.items())]}
    write_atomic(path, orjson.dumps(content).decode())


def _read_month(path: Path) -> Month:
    """Read a month, which is empty without a file; raises ValueError if damaged, or OSError."""
    try:
        content = orjson.loads(_read(path))
    except FileNotFoundError:
        return Month()
    match content:
        case {"folded": int(folded), "rows": list(rows)}:
            return Month(folded, dict(from_rows(rows)))
    raise ValueError(f"{path.name} has another format")


def _read_folded(path: Path) -> int:
    try:
        return _read_month(path).folded
    except ValueError:  # the next fold sets it aside
        return 0


def _set_damaged_files_aside(root: Path) -> list[str]:
    damaged = []
    for path in _months(root).values():
        try:
            _read_month(path)
        except ValueError:
            path.replace(path.with_name(path.name + _DAMAGED))
            damaged.append(path.name)
    return damaged


def _journal_totals(path: Path) -> Mapping[str, Totals]:
    """Return the sums of a journal by month; incomplete lines are skipped.

    Summed line by line: a journal has ten thousand lines of a few accounts.
    """
    months: dict[str, dict[Account, Usage]] = defaultdict(dict)
    for account, usage in _journal_rows(path):
        month = account.day[:7]
        if _MONTH.fullmatch(month):
            add(months[month], account, usage, _ROWS_MAX)
    return months


def _journal_rows(path: Path) -> Iterator[tuple[Account, Usage]]:
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(_LINE_MAX_BYTES):
            with suppress(orjson.JSONDecodeError):
                if found := from_row(orjson.loads(line)):
                    yield found


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(_READ_MAX_BYTES)


def _journals(root: Path) -> dict[int, Path]:
    found = ((_JOURNAL.fullmatch(path.name), path) for path in _list_files(root))
    return {int(match[1]): path for match, path in found if match}


def _months(root: Path) -> dict[str, Path]:
    paths = {path.stem: path for path in _list_files(root) if path.suffix == ".json"}
    return {month: paths[month] for month in sorted(paths) if _MONTH.fullmatch(month)}


def _list_files(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []


_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD_MAX: Final = 4096
# Some thousand requests; then the journal is folded.
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
        """Whether it should be folded soon."""
        return self._size_bytes >= _FULL_BYTES

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def is_empty(self) -> bool:
        return not (self._size_bytes or self._held)

    def write(self, account: Account, usage: Usage) -> str | None:
        """Write one line at once; return why it is only held in memory, or None."""
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
        """Continue in the next file; not in a thread, because `write` may use the last one."""
        before, self._file = self._file, file
        self._number, self._size_bytes, self._is_torn = number, 0, False
        if before is not None:
            os.close(before)
        with suppress(OSError):  # the next write reports it
            self._write_held(file)

    def fold(self) -> list[str]:
        """Count all files before the present one; raises the errors of the function `fold`."""
        return fold(self._root, self._number)

    def close(self) -> None:
        """Count the written lines and release the directory; failures are counted later."""
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
            # A row is complete even without its line's end.
            self._is_torn = written <= len(line)
            if written < len(line):
                return
            del self._held[account]
