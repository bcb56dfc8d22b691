"""The files of older versions are taken over once, whatever interrupts it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor.records import older
from supervisor.records.requests import RecordedRequest
from supervisor.records.store import RecordsFailedError, RecordStore
from supervisor.records.usage import Query
from supervisor.system import files as system_files


def row(day: str, requests: int) -> list[Any]:
    return [day, "anna", "chat", requests, 10, 5, 3, 1.5, 0.25]


def line(**changed: Any) -> dict[str, Any]:
    return {
        "kind": "chat",
        "conversation": 5,
        "prompt_tokens": 40,
        "cached_tokens": 30,
        "generated_tokens": 7,
        "after_any_s": None,
        "after_own_s": None,
        "duration_s": 1.5,
    } | changed


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(content)}\n" for content in lines))


def write_older(data: Path) -> None:
    """Journal 7 is counted by October and not by November; its last line was cut off."""
    usage = data / "usage"
    usage.mkdir(parents=True)
    (usage / "lock").touch()
    month = {"folded": 7, "rows": [row("2026-10-31", 1)]}
    (usage / "2026-10.json").write_text(json.dumps(month))
    month = {"folded": 6, "rows": [row("2026-11-01", 2)]}
    (usage / "2026-11.json").write_text(json.dumps(month))
    write_lines(usage / "journal.7.jsonl", [row("2026-10-31", 8), row("2026-11-01", 16)])
    write_lines(usage / "journal.8.jsonl", [row("2026-11-01", 32), row("2026-11-01", 64)])
    with (usage / "journal.8.jsonl").open("a") as file:
        file.write('["2026-11-01","anna","ch')
    requests = data / "requests" / "org%2Fchat"
    write_lines(requests / "requests.1.jsonl", [line(), line(after_any_s=3.0, conversation=None)])
    write_lines(requests / "requests.jsonl", [line(prompt_tokens=-1e999), line(after_any_s=None)])


def requests_by_day(store: RecordStore) -> dict[str, int]:
    found = {row["day"]: row["requests"] for row in store.answer("usage", Query(("day",)))}
    store.close()
    return found


EXPECTED = {"2026-10-31": 1, "2026-11-01": 2 + 16 + 32 + 64}


def test_usage_and_sizes_are_those_of_the_files_which_are_deleted(tmp_path: Path) -> None:
    write_older(tmp_path)
    store = RecordStore(tmp_path)
    assert store.exists
    assert requests_by_day(store) == EXPECTED
    (found,) = store.answer("usage", Query(("month",), since="2026-11-01"))
    assert (found["total_tokens"], found["slot_seconds"]) == (4 * 18, 6.0)
    first, second, last = map(RecordedRequest._make, store.answer("sizes", "org/chat"))
    assert (first.conversation, first.began_at, first.ended_at) == (5, 0.0, 1.5)
    assert (second.conversation, second.began_at, second.run) == (None, 3.0, first.run)
    assert (last.began_at, last.run == first.run) == (0.0, False)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["history"]
    assert requests_by_day(RecordStore(tmp_path)) == EXPECTED


@pytest.mark.parametrize("step", range(16))
def test_an_end_at_any_step_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write_older(tmp_path)
    steps = 0

    def crash_at(real: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > step:
                raise KeyboardInterrupt
            return real(*given, **options)

        return call

    with monkeypatch.context() as crashing:
        crashing.setattr(older, "open_regular", crash_at(system_files.open_regular))
        crashing.setattr(Path, "unlink", crash_at(Path.unlink))
        crashing.setattr(Path, "rmdir", crash_at(Path.rmdir))
        store = RecordStore(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            store.run(lambda _: None)
        store.close()
    assert requests_by_day(RecordStore(tmp_path)) == EXPECTED
    assert len(RecordStore(tmp_path).answer("sizes", "org/chat")) == 3
    assert not list(tmp_path.rglob("*.json*"))


def test_a_damaged_month_is_set_aside(tmp_path: Path) -> None:
    write_older(tmp_path)
    (tmp_path / "usage" / "2026-10.json").write_bytes(b'{"folded": 0, "ro')
    store = RecordStore(tmp_path)
    assert requests_by_day(store) == EXPECTED | {"2026-10-31": 8}
    reason = "damaged and set aside: 2026-10.json.damaged"
    assert list(store.problems) == [("usage.record_failed", {"reason": reason})]
    assert [path.name for path in (tmp_path / "usage").iterdir()] == ["2026-10.json.damaged"]


def test_what_an_older_version_writes_later_is_added(tmp_path: Path) -> None:
    write_older(tmp_path)
    assert requests_by_day(RecordStore(tmp_path)) == EXPECTED
    write_lines(tmp_path / "usage" / "journal.1.jsonl", [row("2026-11-01", 128)])
    assert requests_by_day(RecordStore(tmp_path))["2026-11-01"] == EXPECTED["2026-11-01"] + 128


def test_a_file_that_cannot_be_read_is_reported_and_the_others_wait(tmp_path: Path) -> None:
    write_older(tmp_path)
    journal = tmp_path / "usage" / "journal.8.jsonl"
    journal.rename(tmp_path / "aside")
    journal.mkdir()
    store = RecordStore(tmp_path)
    assert requests_by_day(store) == {}
    ((name, fields),) = store.problems
    assert name == "usage.record_failed"
    assert "is a directory" in fields["reason"]
    journal.rmdir()
    (tmp_path / "aside").rename(journal)
    assert requests_by_day(RecordStore(tmp_path)) == EXPECTED


def test_a_disk_without_space_leaves_the_files(tmp_path: Path) -> None:
    write_older(tmp_path)
    store = RecordStore(tmp_path)
    store.path.mkdir(parents=True)  # as little a file as a full disk allows
    with pytest.raises(RecordsFailedError):
        requests_by_day(store)
    store.path.rmdir()
    assert requests_by_day(store) == EXPECTED
