"""The tables, and the version of their layout.

A result is in its table once, by its primary key; the files of a batch's results are read from
there, so nothing is copied when a batch ends. Lines keep their end of line: a file is their sum.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from proxy.errors import StorageFailed

VERSION: Final = 1

_TABLES: Final = (
    """
    CREATE TABLE files (
        key INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        filename TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER,
        batch INTEGER,
        is_error INTEGER NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE lines (
        file INTEGER NOT NULL,
        number INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (file, number)
    )
    """,
    """
    CREATE TABLE batches (
        key INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file INTEGER NOT NULL,
        input_file_id TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        completed_at INTEGER,
        failed_at INTEGER,
        expired_at INTEGER,
        cancelling_at INTEGER,
        cancelled_at INTEGER,
        total INTEGER NOT NULL DEFAULT 0,
        completed INTEGER NOT NULL DEFAULT 0,
        failed INTEGER NOT NULL DEFAULT 0,
        errors TEXT,
        metadata TEXT,
        output_file_id TEXT,
        error_file_id TEXT,
        output_ttl_s INTEGER
    )
    """,
    "CREATE INDEX batches_by_status ON batches (status)",
    """
    CREATE TABLE results (
        batch INTEGER NOT NULL,
        number INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (batch, number)
    )
    """,
)


def prepare(connection: sqlite3.Connection) -> None:
    """Create the tables of a new database.

    Raises:
        StorageFailed: A newer version wrote it.
    """
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise StorageFailed(
            f"the database of jobs was written by a newer llama-corral (layout {found}, "
            f"here {VERSION}); update llama-corral, or move the database away"
        )
    if found == VERSION:
        return
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute("PRAGMA user_version = 1")
