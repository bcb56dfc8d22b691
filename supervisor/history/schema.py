"""The table of requests, and the version of its layout."""

from __future__ import annotations

import sqlite3
from typing import Final

from supervisor.history.columns import COLUMNS

# Further columns need no new version: an older llama-corral leaves them empty.
VERSION: Final = 1


class UnusableError(Exception):
    """The file is no database of this version; the message is a clause."""


def prepare(connection: sqlite3.Connection) -> None:
    """Create the table of a new database; add the columns that an older one lacks.

    Raises:
        UnusableError: It is damaged, or a newer version wrote it.
    """
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise UnusableError(str(damage))
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise UnusableError(f"it has layout {found} of a newer llama-corral, here {VERSION}")
    has = {row[1] for row in connection.execute("PRAGMA table_info(requests)")}
    missing = {name: kind for name, kind in COLUMNS.items() if name not in has}
    if found == VERSION and not missing:
        return  # nothing is written: it is read on a full disk too
    connection.execute("CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY)")
    for name, kind in missing.items():
        default = " DEFAULT 0" if "NOT NULL" in kind else ""
        connection.execute(f"ALTER TABLE requests ADD COLUMN {name} {kind}{default}")
    connection.execute("CREATE INDEX IF NOT EXISTS requests_by_id ON requests (id)")
    connection.execute("CREATE INDEX IF NOT EXISTS requests_by_end ON requests (ended_at)")
    connection.execute(f"PRAGMA user_version = {VERSION}")
