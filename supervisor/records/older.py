"""Takes over the files in which older versions kept usage and the sizes of requests.

`usage/` has a file of sums for each month, and journals of JSON lines that a month counts if its
`folded` is their number or above. `requests/MODEL/` has two files of JSON lines, the newer and the
older. All are added in one transaction that also notes each file by name, time and size, and are
deleted after it: a process that is killed in between adds no file twice.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from supervisor.records.requests import RecordedRequest, insert
from supervisor.records.usage import Account, Usage, add_usage
from supervisor.system.files import open_regular
from supervisor.system.paths import name_of_file

TAKEN_TABLE: Final = "CREATE TABLE IF NOT EXISTS taken_over (file TEXT PRIMARY KEY) WITHOUT ROWID"
_USAGE, _SIZES = "usage", "requests"
_JOURNAL: Final = re.compile(r"journal\.(\d{1,12})\.jsonl")
_MONTH: Final = re.compile(r"\d{4}-\d\d\.json")
_LOCK: Final = "lock"
_LINE_MAX_BYTES: Final = 64 * 1024
_MONTH_MAX_BYTES: Final = 64 * 1024**2
RUN_BITS: Final = 48


def older_files(data: Path) -> list[Path]:
    """Return the files of older versions below the data directory, in order."""
    found = [
        path
        for path in sorted((data / _USAGE).glob("*"))
        if path.name == _LOCK or _JOURNAL.fullmatch(path.name) or _MONTH.fullmatch(path.name)
    ]
    return [*found, *sorted((data / _SIZES).glob("*/requests*.jsonl"))]


def take_over(connection: sqlite3.Connection, files: list[Path]) -> list[Path]:
    """Add the files not added yet; return the damaged, renamed. Raises OSError: do not commit."""
    marks = {path: f"{path.parent.name}/{path.name} {_stamp(path)}" for path in files}
    known = {row[0] for row in connection.execute("SELECT file FROM taken_over")}
    new = [path for path in files if marks[path] not in known]
    damaged = _take_usage(connection, [path for path in new if path.parent.name == _USAGE])
    for path in new:
        if path.parent.name != _USAGE:
            # The older file of a model is `requests.1.jsonl`, which sorts before the newer.
            model = name_of_file(path.parent.name)
            for sizes in _read_sizes(path):
                insert(connection, "sizes", model, *sizes)
    connection.executemany("INSERT INTO taken_over VALUES (?)", [(marks[path],) for path in new])
    return damaged


def delete(files: list[Path]) -> None:
    """Delete files that were taken over, and directories that are empty then."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    for path in files:
        for directory in (path.parent, path.parent.parent):
            with suppress(OSError):
                directory.rmdir()


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_mtime_ns} {found.st_size}"


def _take_usage(connection: sqlite3.Connection, files: list[Path]) -> list[Path]:
    """Add months, and then the rows of journals that no month counts; return damaged months."""
    folded: dict[str, int] = {}
    damaged = []
    for path in filter(lambda path: _MONTH.fullmatch(path.name), files):
        try:
            folded[path.stem], rows = _read_month(path)
        except ValueError:
            damaged.append(path.replace(path.with_name(f"{path.name}.damaged")))
        else:
            add_usage(connection, rows)
    for path in files:
        if match := _JOURNAL.fullmatch(path.name):
            rows = _read_journal(path)
            is_new = {account: int(match[1]) > folded.get(account[0][:7], 0) for account in rows}
            add_usage(connection, {account: rows[account] for account in rows if is_new[account]})
    return damaged


def _read_month(path: Path) -> tuple[int, dict[Account, Usage]]:
    with open_regular(path) as file:
        content = orjson.loads(file.read(_MONTH_MAX_BYTES))
    match content:
        case {"folded": int(folded), "rows": list(rows)}:
            return folded, dict(filter(None, map(usage_row, rows)))
    raise ValueError(f"{path.name} has another format")


def _read_journal(path: Path) -> dict[Account, Usage]:
    """Return the sums of a journal; incomplete lines are skipped."""
    sums: dict[Account, Usage] = defaultdict(Usage)
    for line in read_lines(path):
        if found := usage_row(line):
            sums[found[0]] += found[1]
    return sums


def usage_row(values: Any) -> tuple[Account, Usage] | None:
    """Read a row of usage; None if it is incomplete or invalid."""
    match list(values) if isinstance(values, list | tuple | sqlite3.Row) else None:
        case [str(day), str(key), str(model), *figures] if len(figures) == 6 and all(
            type(figure) in {int, float} for figure in figures
        ):
            return (day, key, model), Usage(*figures)
    return None


def _read_sizes(path: Path) -> Iterator[RecordedRequest]:
    """Yield recorded requests; each pause counts from the request before, None begins a run."""
    run, began_s = secrets.randbits(RUN_BITS), 0.0
    for line in read_lines(path):
        match line:
            case {
                "conversation": int() | None as conversation,
                "prompt_tokens": int(prompt),
                "cached_tokens": int(cached),
                "generated_tokens": int(generated),
                "after_any_s": int() | float() | None as pause_s,
                "duration_s": int() | float() as duration_s,
            }:
                if pause_s is None:
                    run, began_s = secrets.randbits(RUN_BITS), 0.0
                began_s += pause_s or 0.0
                yield RecordedRequest(
                    run, conversation, began_s, began_s + duration_s, prompt, cached, generated
                )


def read_lines(path: Path) -> Iterator[Any]:
    with open_regular(path) as file:
        while line := file.readline(_LINE_MAX_BYTES):
            with suppress(orjson.JSONDecodeError):
                yield orjson.loads(line)
