"""Ended requests, usage and sizes of requests, in one file."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import until

from proxy.observe.past import HistoryQuery, RatesQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import EVENTS, Event, EventStream
from supervisor.records.requests import FIGURES, RecordedRequest, insert
from supervisor.records.store import RecordStore, journals
from supervisor.records.usage import Query, Usage, add_usage
from supervisor.records.writer import Records
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

SIZED: dict[str, Any] = {
    "kind": "chat",
    "prompt_tokens": 10,
    "cached_tokens": 30,
    "decoded_tokens": 7,
}
WARNINGS = ["history.write_failed", "requests.record_failed", "usage.record_failed"]


class Kept:
    """Records below a directory."""

    def __init__(self, data: Path) -> None:
        self.store = RecordStore(data)
        self.path = self.store.path
        self.emitted: list[Event] = []
        self.settings = HistorySettings()
        self.recorded_models: set[str] = set()
        self.events = EventStream(self.emitted.append)

    @asynccontextmanager
    async def running(
        self, *, held_max: int = 50_000, earlier: Sequence[str] = ()
    ) -> AsyncIterator[Records]:
        """Run records; the requests `earlier` finish before they have a file."""

        def limits() -> tuple[int, float] | None:
            found = self.settings
            return (found.max_bytes, found.max_age_days) if found.enabled else None

        records = Records(
            self.store,
            self.events.emit,
            limits,
            lambda model: model in self.recorded_models,
            held_max=held_max,
        )
        self.events.add_sink(records.observe)
        for request_id in earlier:
            self.finish(request_id)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(records.serve())
            await asyncio.sleep(0)
            yield records
            task.cancel()

    def finish(self, request_id: str = "a", **changed: Any) -> None:
        self.events.emit("request.finished", **(REQUEST | {"request": request_id} | changed))

    def warnings(self) -> list[str]:
        return [event.name for event in self.emitted if not event.name.startswith("request.")]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


async def ids(records: Records, **query: Any) -> list[object]:
    return [request["id"] for request in await records.requests(HistoryQuery(**query))]


async def find(records: Records, request_id: str = "a") -> StoredRequest:
    (found,) = await records.requests(HistoryQuery(request_id=request_id))
    return found


async def used(records: Records, **query: Any) -> list[tuple[object, ...]]:
    """Return the names, requests and total tokens of each sum."""
    asked = Query(**query)
    return [
        (*(row[name] for name in asked.by), row["requests"], row["total_tokens"])
        for row in await records.usage(asked)
    ]


def test_every_figure_of_a_request_is_a_column() -> None:
    fields = set(EVENTS["request.finished"][1]) | set(EVENTS["request.rejected"][1])
    assert fields - {"request", "reason"} == set(FIGURES)


async def test_what_ended_is_found_at_once_and_after_a_restart(kept: Kept) -> None:
    async with kept.running() as records:
        kept.finish()
        kept.events.emit("request.rejected", **REJECTED)
        found = await find(records)
        assert (found["client"], found["streamed"], found["duration_ms"]) == ("laptop", True, 500)
    async with kept.running() as records:
        assert await find(records) == found
        assert (await find(records, "none"))["code"] == "queue_timeout"
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700
    assert b"a reason" not in kept.path.read_bytes()


async def test_no_shared_memory_is_mapped(kept: Kept) -> None:
    """Where it grows on a full disk, SIGBUS ends the process."""
    for _ in range(2):
        async with kept.running() as records:
            kept.finish()
            await ids(records)
            names = {path.name for path in kept.path.parent.iterdir()}
            assert names == {"requests.db", "requests.db-wal", *journal_names(kept)}


async def test_what_arrives_is_written_at_once_and_at_the_end(kept: Kept) -> None:
    async with kept.running(), asyncio.timeout(PATIENCE_S):
        kept.finish("a")
        await until(lambda: b"laptop" in written(kept.path))
    async with kept.running():
        kept.finish("b")
    async with kept.running() as records:
        assert await ids(records) == ["b", "a"]


def written(path: Path) -> bytes:
    files = (path, path.with_name(f"{path.name}-wal"), *journals(path.parent))
    return b"".join(file.read_bytes() for file in files if file.exists())


def journal_names(kept: Kept) -> list[str]:
    return [path.name for path in journals(kept.path.parent)]


def record(records: Records, kept: Kept, request_id: str = "a") -> None:
    kept.finish(request_id, **SIZED)
    records.add_usage("anna", "chat", Usage(1, 2, 3, 4))


async def counts(records: Records) -> tuple[int, int, int]:
    """Return the number of rows of each table."""
    usage = await records.usage(Query())
    sizes: Mapping[str, int] = await records.answer("size_counts", None)
    return len(await ids(records)), sum(row["requests"] for row in usage), sum(sizes.values())


async def test_what_a_killed_process_wrote_is_added_once(kept: Kept, tmp_path: Path) -> None:
    kept.recorded_models = {"chat"}
    killed = Kept(tmp_path / "killed")
    async with kept.running() as records:
        await ids(records)
        record(records, kept)
        shutil.copytree(kept.path.parent, killed.path.parent)  # as a kill would leave it
    (journal,) = journals(killed.path.parent)
    with journal.open("ab") as file:  # cut off, foreign, or with other columns
        file.write(b'\n{"a": 1}\n[3, ["usage", 3], ["requests", 1], ["sizes", null]]')
        file.write(b'\n[["usage","2026-11-22","anna","chat",1,2,3,4,0.0,0.0]')
    for _ in range(2):
        async with killed.running() as records:
            assert await counts(records) == (1, 1, 1)
    assert journal_names(killed) == []
    assert killed.warnings() == []


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_kill_at_either_side_of_the_commit_loses_and_doubles_nothing(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool
) -> None:
    kept.recorded_models = {"chat"}
    killed = Kept(tmp_path / "killed")

    def kill(*_: object) -> None:
        shutil.copytree(kept.path.parent, killed.path.parent)
        monkeypatch.undo()

    async with kept.running() as records:
        await ids(records)
        record(records, kept)
        if is_committed:
            monkeypatch.setattr("supervisor.records.older.delete", kill)
        else:
            monkeypatch.setattr("supervisor.records.usage.prune_usage", kill)
            records._batches = 0
        await ids(records)
        assert len(journal_names(killed)) == 2
        record(records, kept, "b")
        assert await counts(records) == (2, 2, 2)
    async with killed.running() as records:
        record(records, killed, "b")
        assert await counts(records) == (2, 2, 1)


async def test_rows_wait_in_memory_while_the_journal_cannot_be_written(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes) -> int:
        return os_write(file, data[: len(data) // 2])

    os_write = os.write
    kept.recorded_models = {"chat"}
    async with kept.running() as records:
        await ids(records)
        with monkeypatch.context() as full:
            full.setattr("supervisor.records.writer.os.write", write)
            record(records, kept)
            assert await ids(records) == []
        assert await counts(records) == (1, 1, 1)
    assert kept.warnings() == WARNINGS


async def test_requests_are_chosen(kept: Kept) -> None:
    async with kept.running() as records:
        kept.finish("a", model="other")
        kept.finish("b", client="phone")
        kept.finish("c", status=499)
        kept.finish("d")
        assert await ids(records, limit=2) == ["d", "c"]
        assert await ids(records, model="other") == ["a"]
        assert await ids(records, client="phone") == ["b"]
        assert await ids(records, is_failed=True) == ["c"]
        assert await ids(records, since=kept.emitted[2].at.timestamp()) == ["d", "c"]
        assert await records.answer("forget_requests", "other") == 1
        assert await ids(records) == ["d", "c", "b"]
        assert await records.answer("forget_requests", None) == 3


async def test_rates_are_those_of_equal_intervals(kept: Kept) -> None:
    async with kept.running() as records:
        figures = {"decoded_tokens": 40, "prompt_tokens": 80, "queued_ms": 5000.0}
        kept.finish("a", **figures, first_token_ms=200.0)
        kept.finish("b", **figures, first_token_ms=400.0)
        kept.finish("c", client="phone")
        until = kept.emitted[0].at.timestamp() + 5
        assert await records.rates(RatesQuery(until, 10.0, 2, "laptop")) == {
            "tokens_per_second": [0, 8],
            "prompt_tokens_per_second": [0, 16],
            "queued": [0, 1],
            "first_token_s": [None, pytest.approx(0.3)],
        }


async def test_tokens_of_prompts_are_counted_by_model_and_tier(kept: Kept) -> None:
    async with kept.running() as records:
        disk = {"cause": "all_found", "tier": "disk", "saved_ms": 1500.0}
        kept.finish("a", cached_tokens=90, cache_tier="disk", cache=disk)
        kept.finish("b", cached_tokens=80, cache_tier="slot", cache={**disk, "tier": "slot"})
        kept.finish("short", cached_tokens=20)
        kept.finish("far", cached_tokens=70, cache={"cause": "all_found"}, model="remote")
        kept.finish("vectors", kind="embed_or_rerank", model="embed")
        kept.finish("cut", prompt_tokens=None)
        until = kept.emitted[0].at.timestamp() + 5
        found = await records.cache_rates(RatesQuery(until, 10.0, 2))
    none = [0, 0]
    assert found == {
        "chat": {
            "slot": [0, 100],
            "host_cache": none,
            "disk": [0, 90],
            "node": none,
            "computed": [0, 30],
            "saved_s": [0, 3],
        },
        "remote": {
            "slot": none,
            "host_cache": none,
            "disk": none,
            "node": [0, 70],
            "computed": [0, 10],
            "saved_s": none,
        },
    }


async def test_age_and_size_are_bounded(kept: Kept) -> None:
    kept.settings = HistorySettings(max_bytes=1024**2)
    async with kept.running() as records:
        for batch in range(4):
            for number in range(4000):
                kept.finish(f"{batch}.{number}", code="x" * 60)
            await ids(records)
        assert kept.path.stat().st_size <= 1.2 * 1024**2
        assert await ids(records, limit=1) == ["3.3999"]
        assert await ids(records, request_id="0.0") == []
        kept.settings = HistorySettings.model_construct(enabled=True, max_age_days=-1.0)
        kept.finish("last")
        assert await ids(records) == []


async def test_when_the_history_is_off_usage_and_sizes_are_kept_alone(kept: Kept) -> None:
    kept.settings = HistorySettings(enabled=False)
    async with kept.running() as records:
        kept.finish()
        with pytest.raises(HistoryUnavailable, match="no history"):
            await ids(records)
        assert b"laptop" not in written(kept.path)
        kept.recorded_models = {"chat"}
        kept.finish(**SIZED)
        records.add_usage("anna", "chat", Usage(1, 2, 3, 4))
        assert await used(records) == [("anna", "chat", 1, 9)]
        assert await records.answer("size_counts", None) == {"chat": 1}
        assert b"laptop" not in written(kept.path)


async def test_sizes_of_answered_requests_are_kept(kept: Kept) -> None:
    kept.recorded_models = {"chat"}
    async with kept.running() as records:
        for changed in (
            {"conversation": 7},
            {"status": 499},
            {"prompt_tokens": None},
            {"kind": "embed_or_rerank"},
            {"model": "other"},
            {"conversation": None},
        ):
            kept.finish(**(SIZED | changed))
        first, second = await records.answer("sizes", "chat")
        assert first[4:] == (40, 30, 7)
        assert (first.conversation, second.conversation) == (7, None)
        assert first.ended_at - first.began_at == pytest.approx(0.5)
        assert first.run == second.run
        assert await records.answer("forget_sizes", "chat") == {"chat": 2}
        assert await records.answer("sizes", "chat") == []
        assert len(await ids(records)) == 6


async def test_the_latest_sizes_of_each_model_are_kept(kept: Kept) -> None:
    def add(connection: sqlite3.Connection) -> None:
        for number in range(12_010):
            insert(connection, "sizes", "chat", *RecordedRequest(1, None, number, number, 1, 0, 1))

    kept.store.run(add)
    kept.recorded_models = {"other"}
    async with kept.running() as records:
        kept.finish(**(SIZED | {"model": "other"}))
        assert await records.answer("size_counts", None) == {"chat": 12_000, "other": 1}
        assert (await records.answer("sizes", "chat"))[0].began_at == 10


async def test_usage_is_summed_by_names(kept: Kept) -> None:
    def add(connection: sqlite3.Connection) -> None:
        for day in ("2026-10-31", "2026-11-01", "2026-11-02"):
            add_usage(connection, {(day, "anna", "chat"): Usage(1, 10, 5, 3, 1.5, 0.25)})
            add_usage(connection, {(day, "ben", "other"): Usage(1, 1)})

    kept.store.run(add)
    async with kept.running() as records:
        assert await used(records) == [("anna", "chat", 3, 54), ("ben", "other", 3, 3)]
        assert await used(records, by=("month",), key="anna") == [
            ("2026-10", 1, 18),
            ("2026-11", 2, 36),
        ]
        assert await used(records, by=("day",), since="2026-11-02") == [("2026-11-02", 2, 19)]
        assert await used(records, by=("key",), model="other") == [("ben", 3, 3)]
        assert await used(records, by=("month", "key"), since="2026-11-02") == [
            ("2026-11", "anna", 1, 18),
            ("2026-11", "ben", 1, 1),
        ]
        (found,) = await records.usage(Query(("key",), key="anna"))
        assert (found["slot_seconds"], found["cpu_seconds"]) == (4.5, 0.75)


async def test_sixty_months_and_fifty_thousand_accounts_of_a_month_are_kept(kept: Kept) -> None:
    def add(connection: sqlite3.Connection) -> None:
        for month in range(61):
            day = f"{1980 + month // 12}-{month % 12 + 1:02}-01"
            add_usage(connection, {(day, "old", "chat"): Usage(1)})
        keys = range(50_001)
        add_usage(connection, {("2020-05-01", str(key), "chat"): Usage(1) for key in keys})
        # Usage is pruned with the first batch, which may come before the usage below.
        add_usage(connection, {(time.strftime("%Y-%m-%d"), "0", "chat"): Usage(1)})

    kept.store.run(add)
    async with kept.running() as records:
        records.add_usage("0", "chat", Usage(1))
        assert len(await used(records, by=("month",))) == 60
        assert await used(records, key="(others)") == [("(others)", "(others)", 1, 0)]


def scribbled(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def torn(path: Path) -> None:
    """Damage the latest pages."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize(
    ("damage", "is_usage_kept"), [(scribbled, False), (torn, True), (newer, False)]
)
async def test_a_file_that_cannot_be_read_is_kept_beside_a_new_one(
    kept: Kept, damage: Callable[[Path], None], *, is_usage_kept: bool
) -> None:
    kept.recorded_models = {"chat"}
    async with kept.running() as records:
        records.add_usage("anna", "chat", Usage(1, 2, 3, 4))
        kept.finish(**SIZED)
        await ids(records)
        kept.recorded_models = set()
        for number in range(200):
            kept.finish(f"old{number}")
    damage(kept.path)
    async with kept.running() as records:
        kept.finish("new")
        assert await ids(records) == ["new"]
        assert await used(records) == [("anna", "chat", 1, 9)] * is_usage_kept
        assert len(await records.answer("sizes", "chat")) == is_usage_kept
        assert kept.warnings() == ["history.replaced"]
        backup = kept.path.with_suffix(".damaged.db")
        assert backup.exists()
        assert await records.answer("forget_requests", None) == 1
        assert not backup.exists()


async def test_an_older_table_gets_the_columns_that_it_lacks(kept: Kept) -> None:
    async with kept.running():
        kept.finish("old", stalled_ms=7.0)
    with sqlite3.connect(kept.path) as connection:
        connection.execute("ALTER TABLE requests DROP COLUMN stalled_ms")
        connection.execute("ALTER TABLE requests ADD COLUMN of_a_newer_version TEXT")
    connection.close()
    async with kept.running() as records:
        kept.finish("new", stalled_ms=8.0)
        assert (await find(records, "old"))["stalled_ms"] is None
        assert (await find(records, "new"))["stalled_ms"] == 8
    assert kept.warnings() == []


async def test_while_it_cannot_be_written_there_is_one_warning_and_nothing_is_lost(
    kept: Kept,
) -> None:
    kept.recorded_models = {"chat"}
    kept.path.parent.mkdir(parents=True)
    kept.path.parent.chmod(0o700)
    kept.path.mkdir()  # as little a file as a full disk allows
    async with kept.running() as records:
        for number in range(3):
            kept.finish(f"kept{number}", **SIZED)
            records.add_usage("anna", "chat", Usage(1, 2, 3, 4))
            with pytest.raises(HistoryUnavailable):
                await ids(records)
        assert kept.warnings() == WARNINGS
        kept.path.rmdir()
        assert await ids(records) == ["kept2", "kept1", "kept0"]
        assert await used(records) == [("anna", "chat", 3, 27)]
    assert kept.warnings() == WARNINGS


async def test_of_rows_that_wait_for_the_first_file_the_oldest_are_dropped_and_counted(
    kept: Kept,
) -> None:
    async with kept.running(held_max=3, earlier="01234") as records:
        assert await ids(records) == ["4", "3", "2"]
    (warning,) = [event for event in kept.emitted if event.name == "history.write_failed"]
    assert warning.fields["reason"] == "2 records were dropped: too many waited"


async def test_of_rows_that_wait_for_the_disk_the_oldest_are_dropped_and_counted(
    kept: Kept,
) -> None:
    kept.path.parent.mkdir(parents=True, mode=0o700)
    kept.path.mkdir()  # as little a file as a full disk allows
    async with kept.running(held_max=3) as records:
        for numbers in ("012", "34"):
            for number in numbers:
                kept.finish(number)
            with pytest.raises(HistoryUnavailable):
                await ids(records)
        kept.path.rmdir()
        assert await ids(records) == ["4", "3", "2"]
    *_, warning = [event for event in kept.emitted if event.name == "history.write_failed"]
    assert warning.fields["reason"] == "2 records were dropped: too many waited"


async def test_a_row_that_sqlite_cannot_store_costs_no_other(kept: Kept) -> None:
    async with kept.running() as records:
        kept.finish("a", model="\ud800")
        kept.finish("b", slot=2**64)
        kept.finish("c")
        assert await ids(records) == ["c"]
    assert kept.warnings() == []


async def test_another_process_that_uses_the_file_is_named_as_the_reason(kept: Kept) -> None:
    other = RecordStore(kept.path.parent.parent)
    other.run(lambda _: None)
    async with kept.running() as records:
        with pytest.raises(HistoryUnavailable, match="another process uses it"):
            await ids(records)
        other.close()
        kept.finish()
        assert await ids(records) == ["a"]
