CREATE TABLE files (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, state TEXT NOT NULL, filename TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
    batch INTEGER, is_error INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE lines (
    file INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE batches (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file INTEGER NOT NULL, input_file_id TEXT NOT NULL, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    errors TEXT, metadata TEXT, output_file_id TEXT, error_file_id TEXT, output_ttl_s INTEGER
);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE results (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, outcome TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (batch, number)
);
PRAGMA user_version = 1;
