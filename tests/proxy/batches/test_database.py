"""The database file: private, of one daemon, bounded, and of a known layout."""

import sqlite3
import stat
from pathlib import Path

import pytest
from support.jobs_harness import JobsHarness

from proxy.batches import database, rows
from proxy.batches.database import Database
from proxy.errors import Draining, StorageFailed, StorageFull


async def test_only_this_user_can_read_it(jobs: JobsHarness) -> None:
    jobs.path.parent.mkdir(mode=0o700)
    jobs.path.touch(0o644)
    await jobs.file([b"{}\n"])
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in jobs.path.parent.iterdir()}
    assert found == {"jobs.sqlite": 0o600, "jobs.sqlite-wal": 0o600}


async def test_no_shared_memory_is_mapped_when_it_is_opened_again(jobs: JobsHarness) -> None:
    """Where it grows on a full disk, SIGBUS ends the process."""
    await jobs.file([b"{}\n"])
    await jobs.close()
    jobs.configure()
    await jobs.database.run(rows.used_bytes)
    names = {path.name for path in jobs.path.parent.iterdir()}
    assert names == {"jobs.sqlite", "jobs.sqlite-wal"}


async def test_a_commit_waits_for_the_disk(jobs: JobsHarness) -> None:
    pragmas = ("journal_mode", "synchronous", "user_version")
    found = [
        await jobs.database.run(
            lambda connection: connection.execute(f"PRAGMA {name}").fetchone()[0]  # noqa: B023
        )
        for name in pragmas
    ]
    assert found == ["wal", 2, database.VERSION]  # 2: FULL


async def test_a_second_daemon_is_refused(jobs: JobsHarness) -> None:
    await jobs.file([b"{}\n"])
    other = Database(jobs.path, 2**30, lambda _: None)
    with pytest.raises(StorageFailed, match="another daemon"):
        await other.run(rows.used_bytes)
    other.close()


async def test_a_newer_layout_is_refused(jobs: JobsHarness) -> None:
    await jobs.file([b"{}\n"])
    await jobs.close()
    with sqlite3.connect(jobs.path) as connection:
        connection.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    connection.close()
    jobs.configure()
    with pytest.raises(StorageFailed, match="newer llama-corral"):
        await jobs.database.run(rows.used_bytes)


@pytest.mark.parametrize("content", [b"no database, but long enough to look at" * 50])
async def test_another_file_in_its_place_is_refused(jobs: JobsHarness, content: bytes) -> None:
    jobs.path.parent.mkdir()
    jobs.path.write_bytes(content)
    with pytest.raises(StorageFailed, match="not a database"):
        await jobs.database.run(rows.used_bytes)


async def test_its_size_is_bounded_and_deleted_files_free_space(tmp_path: Path) -> None:
    jobs = JobsHarness(tmp_path)
    jobs.configure(max_bytes=1024**2)
    with pytest.raises(StorageFull, match="total_bytes"):
        await jobs.file([b"x" * 100_000 + b"\n"] * 20)
    assert jobs.emitted[-1][0] == "batches.paused"
    while await jobs.database.run(rows.sweep_files, ()):
        pass
    assert jobs.emitted[-1][0] == "batches.resumed"
    await jobs.file([b"x" * 100_000 + b"\n"])
    assert jobs.path.stat().st_size <= 1024**2
    await jobs.close()


async def test_a_call_after_its_end_is_refused(jobs: JobsHarness) -> None:
    jobs.database.close()
    with pytest.raises(Draining):
        await jobs.database.run(rows.used_bytes)
