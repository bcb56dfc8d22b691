import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.slot_files import manifest, write

from supervisor.engine.client import SlotFileInfo
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotFileMissing
from supervisor.slot_store.slot_transfer import check_out
from supervisor.slot_store.store import Quarantine, SlotStore
from supervisor.system.files import sha256_of


@pytest.fixture
def store(tmp_path: Path) -> SlotStore:
    return SlotStore(tmp_path / "slots")


def unverified(spooled: Path, written: SlotFileInfo, minutes: int = 0) -> Manifest:
    tokens, size_bytes = written.tokens, written.size_bytes
    return manifest(spooled.stem, minutes, tokens=tokens, size_bytes=size_bytes)


def put(store: SlotStore, first: int, minutes: int = 0) -> Manifest:
    """Adopt a conversation of 300 tokens that begins with this one."""
    spooled = store.spool("chat.0") / f"{first}.new"
    moved = write(spooled, range(first, first + 300))
    found, replaced = store.add(spooled, unverified(spooled, moved, minutes), [], 256)
    assert found
    assert not replaced
    return found


def names(store: SlotStore) -> set[str]:
    return {path.name for path in store.root.rglob("*") if path.is_file()}


def test_an_added_file_leaves_the_spool(store: SlotStore) -> None:
    one = put(store, 1000)
    assert store.list_saved() == store.list_saved("chat") == [one]
    assert store.list_saved("other") == []
    assert names(store) == {"1000.slot", "1000.json"}


def test_a_file_that_differs_from_the_report_is_not_stored(store: SlotStore) -> None:
    for info in (SlotFileInfo(300, 7), SlotFileInfo(299, 0)):
        spooled = store.spool("chat.0") / "a.new"
        moved = write(spooled, range(300))
        reported = SlotFileInfo(info.tokens, info.size_bytes or moved.size_bytes)
        with pytest.raises(InvalidSlotFile):
            store.add(spooled, unverified(spooled, reported), [], 256)
        assert names(store) == set()


def test_check_out_links_a_verified_file(store: SlotStore) -> None:
    one = put(store, 1000)
    link, other = (store.check_out(one, store.spool("chat.0"), one.identity) for _ in range(2))
    assert link != other
    assert link.name.partition(".")[0] == other.name.partition(".")[0] == "1000"
    assert link.read_bytes() == (store.root / "kept" / "chat" / "1000.slot").read_bytes()


def test_a_copy_for_which_a_request_waits_is_not_forced_to_the_disk(
    store: SlotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = put(SlotStore(tmp_path / "other"), 1000)
    copy = store.new_copy(sent)
    copy.write_bytes((tmp_path / "other" / "kept" / "chat" / "1000.slot").read_bytes())
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    store.adopt(copy, sent)
    assert not synced
    assert store.list_saved() == [sent]
    (store.root / "kept" / "chat" / "1000.slot").write_bytes(b"")  # the machine crashed
    with pytest.raises(InvalidSlotFile):
        store.check_out(sent, store.spool("chat.0"), sent.identity)


async def test_a_cancelled_check_leaves_nothing_in_the_spool(store: SlotStore) -> None:
    first, spool = put(store, 1000), store.spool("chat.0")
    may_end, is_checking = threading.Event(), asyncio.Event()
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)

    class Slow(SlotStore):
        def check_out(self, manifest: Manifest, spool: Path, key: CacheKey) -> Path:
            loop.call_soon_threadsafe(is_checking.set)
            may_end.wait()
            return super().check_out(manifest, spool, key)

    async with asyncio.TaskGroup() as group:
        work = check_out(Slow(store.root), first, spool, first.identity, threads)
        checking = group.create_task(work)
        await is_checking.wait()
        checking.cancel()
    before = list(spool.iterdir())
    may_end.set()
    await loop.run_in_executor(None, threads.shutdown)
    await asyncio.sleep(0)
    assert before == list(spool.iterdir()) == []


def test_a_file_that_no_engine_may_have_read_has_another_ending(
    store: SlotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, endings = put(store, 1000), list[str]()
    monkeypatch.setattr(
        "supervisor.slot_store.store.refit", lambda path, *_, **__: endings.append(path.suffix)
    )
    assert store.check_out(first, store.spool("chat.0"), first.identity).suffix == ".slot"
    assert endings == [".draft"]


def test_an_altered_file_is_not_checked_out(store: SlotStore) -> None:
    one = put(store, 1000)
    path = store.root / "kept" / "chat" / "1000.slot"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(InvalidSlotFile, match="altered"):
        store.check_out(one, store.spool("chat.0"), one.identity)
    path.unlink()
    with pytest.raises(InvalidSlotFile, match="it is gone"):
        store.check_out(one, store.spool("chat.0"), one.identity)
    path.with_suffix(".json").unlink()
    with pytest.raises(SlotFileMissing):
        store.check_out(one, store.spool("chat.0"), one.identity)


def test_a_file_of_an_earlier_version_is_verified_by_its_sha256(store: SlotStore) -> None:
    one = put(store, 1000)
    path = store.root / "kept" / "chat" / "1000.slot"
    earlier = replace(one, checksum=sha256_of(path))
    assert store.check_out(earlier, store.spool("chat.0"), one.identity).is_file()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(InvalidSlotFile, match="altered"):
        store.check_out(earlier, store.spool("chat.0"), one.identity)


def test_clean_up_deletes_partial_files(store: SlotStore) -> None:
    put(store, 1000)
    kept = store.root / "kept" / "chat"
    for name in ("orphan.slot", "draft.tmp", "0.json"):
        (kept / name).write_bytes(b"x")
    (store.spool("chat.0") / "half.new").write_bytes(b"x")
    (store.root / "kept" / "empty").mkdir()
    store.clean_up()
    there, new, invalid, errors = store.read_new({"1000"})
    assert (there, new, [name for _, name, _ in invalid]) == ({"1000", "0"}, [], ["0"])
    assert not errors
    assert names(store) == {"1000.slot", "1000.json", "0.json"}
    assert store.quarantine.names() == ["0.json"]
    assert not (store.root / "kept" / "empty").exists()


@pytest.mark.parametrize(
    ("limits", "count"),
    [({"max_files": 4}, 4), ({"max_bytes": 10}, 0), ({"max_age": timedelta(0)}, 0)],
)
def test_the_quarantine_is_bounded_in_number_bytes_and_age(
    tmp_path: Path, limits: dict[str, Any], count: int
) -> None:
    quarantine = Quarantine(tmp_path / "quarantine", **limits)
    for number in range(6):
        path = tmp_path / f"{number}.slot"
        path.write_bytes(b"twenty bytes of data")
        quarantine.take(path)
    assert len(quarantine.names()) == count


def test_forget_empties_the_quarantine(store: SlotStore) -> None:
    store.quarantine_file(put(store, 1000), "for a test")
    put(store, 2000)
    assert [entry.name for entry in store.forget()] == ["2000"]
    assert names(store) == set()
    store.quarantine_file(put(store, 1000), "for a test")
    put(store, 2000)
    store.forget_files([put(store, 3000)])
    assert names(store) == {"2000.slot", "2000.json"}


def test_a_model_name_is_never_used_as_a_path(store: SlotStore, tmp_path: Path) -> None:
    put(store, 1000)
    (tmp_path / "precious").mkdir()
    assert store.forget("../../precious") == []
    assert (tmp_path / "precious").exists()
    assert len(store.list_saved()) == 1


def test_a_full_disk_leaves_no_file(store: SlotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    spooled = store.spool("chat.0") / "a.new"
    moved = write(spooled, range(300))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.add(spooled, unverified(spooled, moved), [], 256)
    assert names(store) == set()


def test_files_of_a_model_whose_name_has_slashes_are_found_again(store: SlotStore) -> None:
    spooled = store.spool("qwen/tiny:q4.0") / "a.new"
    moved = write(spooled, range(300))
    new = replace(unverified(spooled, moved), model="qwen/tiny:q4")
    found, _ = store.add(spooled, new, [], 256)
    assert found
    assert SlotStore(store.root).list_saved("qwen/tiny:q4") == [found]
    assert store.read_new(()) == ({"a"}, [found], [], [])
    assert store.check_out(found, store.spool("qwen/tiny:q4.0"), found.identity).is_file()
    assert {path.name for path in store.root.glob("*/*")} == {"qwen%2Ftiny:q4", "qwen%2Ftiny:q4.0"}
    assert store.forget("qwen/tiny:q4") == [found]
    assert store.list_saved() == []
