"""Figures of requests that have ended, on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import until

from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import EVENTS, Event, EventStream
from supervisor.records.history import FIGURES, History, HistoryDatabase
from supervisor.settings.tables import HistorySettings

REQUEST: dict[str, Any] = {
    **dict.fromkeys(EVENTS["request.finished"][1]),
    "model": "chat",
    "client": "laptop",
    "status": 200,
    "streamed": True,
    "duration_ms": 500.0,
    "prompt_tokens": 10,
}
REJECTED: dict[str, Any] = {
    **dict.fromkeys(EVENTS["request.rejected"][1]),
    "request": "none",
    "status": 503,
    "code": "queue_timeout",
    "reason": "a reason that is not stored",
}


class Kept:
    """A history below a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.emitted: list[Event] = []
        self.settings = HistorySettings()
        self.events = EventStream(self.emitted.append)

    @asynccontextmanager
    async def running(self, batch_s: float = 1.0) -> AsyncIterator[History]:
        database = HistoryDatabase(self.path)
        history = History(database, self.events.emit, lambda: self.settings, batch_s=batch_s)
        self.events.add_sink(history.observe)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(history.serve())
            await asyncio.sleep(0)
            yield history
            task.cancel()

    def finish(self, request_id: str = "a", **changed: Any) -> None:
        self.events.emit("request.finished", **(REQUEST | {"request": request_id} | changed))

    def warnings(self) -> list[str]:
        return [event.name for event in self.emitted if event.name.startswith("history.")]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "history" / "requests.db")


async def ids(history: History, **query: Any) -> list[object]:
    return [request["id"] for request in await history.requests(HistoryQuery(**query))]


async def one(history: History, request_id: str = "a") -> StoredRequest:
    (found,) = await history.requests(HistoryQuery(request_id=request_id))
    return found


def test_every_figure_of_a_request_is_a_column() -> None:
    fields = set(EVENTS["request.finished"][1]) | set(EVENTS["request.rejected"][1])
    assert fields - {"request", "reason"} == set(FIGURES)


async def test_what_ended_is_found_at_once_and_after_a_restart(kept: Kept) -> None:
    async with kept.running() as history:
        kept.finish()
        kept.events.emit("request.rejected", **REJECTED)
        found = await one(history)
        assert (found["client"], found["streamed"], found["duration_ms"]) == ("laptop", True, 500)
    async with kept.running() as history:
        assert await one(history) == found
        assert (await one(history, "none"))["code"] == "queue_timeout"
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700
    assert b"a reason" not in kept.path.read_bytes()


async def test_no_shared_memory_is_mapped(kept: Kept) -> None:
    """Where it grows on a full disk, SIGBUS ends the process."""
    for _ in range(2):
        async with kept.running() as history:
            kept.finish()
            await ids(history)
            names = {path.name for path in kept.path.parent.iterdir()}
            assert names == {"requests.db", "requests.db-wal"}


async def test_what_was_observed_is_written_in_a_while_and_at_the_end(kept: Kept) -> None:
    async with kept.running(batch_s=0.0), asyncio.timeout(PATIENCE_S):
        kept.finish("a")
        await until(kept.path.exists)
    async with kept.running(batch_s=3600):
        kept.finish("b")
    async with kept.running() as history:
        assert await ids(history) == ["b", "a"]


async def test_requests_are_chosen(kept: Kept) -> None:
    async with kept.running() as history:
        kept.finish("a", model="other")
        kept.finish("b", client="phone")
        kept.finish("c", status=499)
        kept.finish("d")
        assert await ids(history, limit=2) == ["d", "c"]
        assert await ids(history, model="other") == ["a"]
        assert await ids(history, client="phone") == ["b"]
        assert await ids(history, is_failed=True) == ["c"]
        assert await ids(history, since=kept.emitted[2].at.timestamp()) == ["d", "c"]
        assert await history.forget("other") == 1
        assert await ids(history) == ["d", "c", "b"]
        assert await history.forget(None) == 3


async def test_age_and_size_are_bounded(kept: Kept) -> None:
    kept.settings = HistorySettings(max_bytes=1024**2)
    async with kept.running() as history:
        for batch in range(4):
            for number in range(4000):
                kept.finish(f"{batch}.{number}", code="x" * 60)
            await ids(history)
        assert kept.path.stat().st_size <= 1.2 * 1024**2
        assert await ids(history, limit=1) == ["3.3999"]
        assert await ids(history, request_id="0.0") == []
        kept.settings = HistorySettings(max_age_days=1e-12)
        kept.finish("last")
        assert await ids(history) == []


async def test_when_it_is_off_nothing_is_kept(kept: Kept) -> None:
    kept.settings = HistorySettings(enabled=False)
    async with kept.running() as history:
        kept.finish()
        with pytest.raises(HistoryUnavailable, match="no history"):
            await ids(history)
    assert not kept.path.exists()


def scribbled(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def torn(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)
        file.write(b"\xff" * (size // 2))


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("damage", [scribbled, torn, newer])
async def test_a_file_that_cannot_be_read_is_kept_beside_a_new_one(
    kept: Kept, damage: Callable[[Path], None]
) -> None:
    async with kept.running():
        for number in range(200):
            kept.finish(f"old{number}")
    damage(kept.path)
    async with kept.running() as history:
        kept.finish("new")
        assert await ids(history) == ["new"]
    assert kept.warnings() == ["history.replaced"]
    assert kept.path.with_suffix(".damaged.db").exists()


async def test_an_older_table_gets_the_columns_that_it_lacks(kept: Kept) -> None:
    async with kept.running():
        kept.finish("old", stalled_ms=7.0)
    with sqlite3.connect(kept.path) as connection:
        connection.execute("ALTER TABLE requests DROP COLUMN stalled_ms")
        connection.execute("ALTER TABLE requests ADD COLUMN of_a_newer_version TEXT")
    connection.close()
    async with kept.running() as history:
        kept.finish("new", stalled_ms=8.0)
        assert (await one(history, "old"))["stalled_ms"] is None
        assert (await one(history, "new"))["stalled_ms"] == 8
    assert kept.warnings() == []


async def test_a_full_disk_is_one_warning_until_a_write_succeeds(kept: Kept) -> None:
    kept.path.parent.mkdir(parents=True)
    kept.path.parent.chmod(0o700)
    kept.path.mkdir()  # as little a file as a full disk allows
    async with kept.running() as history:
        for number in range(3):
            kept.finish(f"lost{number}")
            with pytest.raises(HistoryUnavailable):
                await ids(history)
        assert kept.warnings() == ["history.write_failed"]
        kept.path.rmdir()
        kept.finish("kept")
        assert await ids(history) == ["kept"]
    assert kept.warnings() == ["history.write_failed"]
