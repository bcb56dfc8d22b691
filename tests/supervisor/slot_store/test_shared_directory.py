"""Daemons that share a directory of slot files agree without a lock."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.instance_harness import RecordingTraffic
from support.slot_files import manifest, write

from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.shared_directory import SharedDirectory, in_charge
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotFileMissing
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.store_config import SlotPersistence


def ignore(_event: str, /, **_fields: object) -> None:
    """Have no listener."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store_of(tmp_path: Path, name: str, clock: Clock | None = None) -> SlotStore:
    own = tmp_path / name
    own.mkdir(mode=0o700, exist_ok=True)
    shared = SharedDirectory(tmp_path / "shared", own, clock or Clock())
    return SlotStore(own, shared=shared)


def shared_of(store: SlotStore) -> SharedDirectory:
    assert store.shared
    return store.shared


def put(store: SlotStore, first: int, minutes: int = 0) -> Manifest:
    spooled = store.spool("chat.0") / f"{first}.new"
    moved = write(spooled, range(first, first + 300))
    size_bytes, daemon = moved.size_bytes, shared_of(store).daemon
    unverified = manifest(spooled.stem, minutes, size_bytes=size_bytes, daemon=daemon)
    found, _ = store.add(spooled, unverified, [], 256)
    assert found
    return found


def files_of(store: SlotStore, emit: Emit = ignore, **limits: object) -> SlotFiles:
    budget = replace(DiskBudget(1 << 30, max_age=timedelta(days=36_500)), **limits)  # type: ignore[arg-type]
    persistence = SlotPersistence(store, is_on=True, limits=budget, timeout_s=60.0)
    return SlotFiles(lambda: persistence, RecordingTraffic(), emit)


def test_each_file_has_one_daemon_in_charge_and_a_dead_one_moves_only_its_own() -> None:
    names = [f"file {number}" for number in range(300)]
    before = {name: in_charge(name, {"a", "b", "c"}) for name in names}
    after = {name: in_charge(name, {"a", "b"}) for name in names}
    assert all(list(before.values()).count(daemon) > 60 for daemon in "abc")
    assert all(after[name] == before[name] for name in names if before[name] != "c")
    assert in_charge("file", ()) is None


def test_a_daemon_is_alive_while_its_heartbeat_changes(tmp_path: Path) -> None:
    clocks = Clock(), Clock()
    clocks[1].now_s = 1e6  # they share no time
    one, two = (
        shared_of(store_of(tmp_path, name, clock)) for name, clock in zip("ab", clocks, strict=True)
    )
    for _ in range(20):
        for shared, clock in zip((one, two), clocks, strict=True):
            clock.now_s += 15
            shared.beat()
    assert one.alive == two.alive == {one.daemon, two.daemon}
    for _ in range(10):
        clocks[0].now_s += 15
        one.beat()
    assert one.alive == {one.daemon}
    assert one.owns("file", two.daemon)
    two.beat()  # it was suspended
    one.beat()
    assert one.alive == {one.daemon, two.daemon}
    two.end()
    one.beat()
    assert one.alive == {one.daemon}


def test_a_daemon_keeps_its_name_over_a_restart(tmp_path: Path) -> None:
    first = shared_of(store_of(tmp_path, "a"))
    first.beat()
    assert shared_of(store_of(tmp_path, "a")).daemon == first.daemon
    assert shared_of(store_of(tmp_path, "b")).daemon != first.daemon


def test_files_of_each_other_are_listed_verified_and_restored(tmp_path: Path) -> None:
    one, two = store_of(tmp_path, "a"), store_of(tmp_path, "b")
    saved = put(one, 1000)
    assert two.list_saved() == [saved]
    link = two.check_out(saved, two.spool("chat.0"), saved.identity)
    assert link.read_bytes() == (tmp_path / "shared/kept/chat/1000.slot").read_bytes()
    assert one.is_ours(saved)
    assert two.is_ours(saved)  # nobody else is alive
    for store in (one, two, one):
        store.poll()
    assert one.is_ours(saved)
    assert not two.is_ours(saved)


def test_files_move_between_file_systems_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file_system(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    store, replaced = store_of(tmp_path, "a"), Path.replace
    monkeypatch.setattr(os, "link", other_file_system)
    monkeypatch.setattr(
        Path,
        "replace",
        lambda path, target: (
            other_file_system()
            if path.suffix == ".new" and "spool" in path.parts
            else replaced(path, target)
        ),
    )
    saved = put(store, 1000)
    link = store.check_out(saved, store.spool("chat.0"), saved.identity)
    assert link.stat().st_mode & 0o777 == 0o600

    def full(_: Path, target: Path) -> None:
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        put(store, 2000)
    with pytest.raises(OSError, match="No space"):
        store.check_out(saved, store.spool("chat.0"), saved.identity)
    assert {path.stem for path in (tmp_path / "shared/kept/chat").iterdir()} == {"1000"}
    assert list(store.spool("chat.0").iterdir()) == [link]


def test_a_failing_file_system_says_nothing_about_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, "a")
    saved = put(store, 1000)

    def failing(number: int) -> Callable[..., None]:
        def link(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return link

    spool = store.spool("chat.0")
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        store.check_out(saved, spool, saved.identity)
    monkeypatch.setattr(os, "link", failing(errno.ESTALE))
    with pytest.raises(SlotFileMissing):
        store.check_out(saved, spool, saved.identity)
    monkeypatch.undo()
    path = tmp_path / "shared/kept/chat/1000.slot"
    path.write_bytes(path.read_bytes()[:-1])  # truncated meanwhile
    with pytest.raises(InvalidSlotFile):
        store.check_out(saved, spool, saved.identity)


def fail_on(monkeypatch: pytest.MonkeyPatch, method: str, fails: Callable[[Path], bool]) -> None:
    """Have a method of paths fail as on a disk with errors."""
    done = getattr(Path, method)

    def failing(path: Path, *given: Any, **named: Any) -> Any:
        if fails(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return done(path, *given, **named)

    monkeypatch.setattr(Path, method, failing)


async def test_files_that_cannot_be_read_stay_and_are_reported_until_they_can(
    tmp_path: Path,
) -> None:
    one, events = store_of(tmp_path, "a"), list[tuple[str, dict[str, Any]]]()
    saved = [put(one, 1000 * number) for number in range(3)]

    def emit(event: str, /, **fields: object) -> None:
        events.append((event, fields))

    files = files_of(store_of(tmp_path, "b"), emit)
    with pytest.MonkeyPatch.context() as patch:
        fail_on(patch, "read_text", lambda path: path.stem in {"0", "1000"})
        for _ in range(2):
            await files.reconcile()
        assert files.catalogue.names == {"2000"}
        ((event, fields),) = events
        assert (event, fields["files"]) == ("slots.files_unreadable", 2)
        assert fields["reason"] == f"{tmp_path / 'shared'}: Input/output error"
        with pytest.raises(AccessDenied, match=r"cannot list the files in .*Input/output"):
            one.forget("chat")  # otherwise it would seem to be forgotten
    await files.reconcile()
    assert files.catalogue.names == {found.name for found in saved}
    assert one.list_saved() == saved


def test_a_directory_that_cannot_be_read_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, "a")
    assert not store.list_saved()
    put(store, 1000)
    fail_on(monkeypatch, "lstat", lambda path: path.name == "kept")
    with pytest.raises(AccessDenied, match="Input/output"):
        store.list_saved()


def test_forgetting_fails_if_a_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, "a")
    saved = put(store, 1000)
    fail_on(monkeypatch, "unlink", lambda path: path.suffix == ".json")
    for forget in (store.forget, lambda: store.forget_files([saved])):
        with pytest.raises(AccessDenied, match=r"cannot delete all files in .*Input/output"):
            forget()


def test_a_file_whose_manifest_is_not_completed_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = store_of(tmp_path, "a")
    monkeypatch.setattr(os, "utime", fail)
    with pytest.raises(OSError, match="Input/output"):
        put(store, 1000)
    assert not list((tmp_path / "shared/kept/chat").iterdir())


def test_partial_files_are_deleted_once_nobody_writes_them(tmp_path: Path) -> None:
    store = store_of(tmp_path, "a")
    saved = put(store, 1000)
    kept = tmp_path / "shared/kept/chat"
    for name in ("2000.new", "3000.slot", ".4000.json.x"):
        (kept / name).touch()
    store.poll()
    store.clean_up()
    store.delete_partial()
    assert len(list(kept.iterdir())) == 5  # another daemon may write them
    for path in kept.iterdir():
        os.utime(path, (0, 0))
    store.delete_partial()
    assert {path.name for path in kept.iterdir()} == {"1000.slot", "1000.json"}
    assert store.forget() == [saved]
    assert kept.is_dir()


def test_a_directory_that_is_no_longer_mounted_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, "a")
    store.poll()
    (tmp_path / "shared").rename(tmp_path / "away")
    found, stat = (tmp_path / "away").stat(), Path.stat
    other = os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))
    monkeypatch.setattr(
        Path, "stat", lambda path, **how: other if path.name == "shared" else stat(path, **how)
    )
    with pytest.raises(OSError, match="another file system"):
        store.poll()
    monkeypatch.undo()
    (tmp_path / "shared").rmdir()
    (tmp_path / "away").rename(tmp_path / "shared")
    store.poll()


def test_a_change_is_reported_twice(tmp_path: Path) -> None:
    store = store_of(tmp_path, "a")
    found = [store.poll()[0] for _ in range(3)]
    put(store_of(tmp_path, "b"), 1000)
    assert [*found, *(store.poll()[0] for _ in range(4))] == [
        *(True, False, False),
        *(True, True, False, False),
    ]


async def test_daemons_share_the_work_of_deleting(tmp_path: Path) -> None:
    stores = [store_of(tmp_path, name) for name in "abc"]
    # Names are random, so so many that each daemon is in charge of some.
    for number in range(90):
        put(stores[number % 3], 1000 * number, number)
    daemons = [files_of(store, files=10, files_a_model=10) for store in stores]
    for store in (*stores, *stores):
        store.poll()
    used = stores[0].list_saved()[0]
    for daemon in daemons:
        await daemon.reconcile()
    stores[1].mark_used(used, used.used_at + timedelta(days=1))
    counts = [len(stores[0].list_saved())]
    for daemon in daemons:
        await daemon.evict()
        counts.append(len(stores[0].list_saved()))
    left = stores[0].list_saved()
    assert counts == sorted({*counts}, reverse=True)  # each deletes some
    assert len(left) == 11  # the ten used last, and the file used since they looked
    assert used.name in {found.name for found in left}
    assert all(found.used_at > manifest(minutes=79).used_at for found in left)


async def test_a_look_that_began_before_a_file_appeared_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, polled, may_end = store_of(tmp_path, "a"), threading.Event(), threading.Event()
    files, poll = files_of(store), store.poll

    def poll_slowly() -> tuple[bool, dict[str, int]]:
        found = poll()
        polled.set()
        may_end.wait(PATIENCE_S)
        return found

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        serving = group.create_task(files.serve())
        await asyncio.sleep(0)
        put(store_of(tmp_path, "b"), 1000)
        for _ in range(3):  # until no change is reported any more
            await files.look()
        assert files.catalogue.names == {"1000"}
        monkeypatch.setattr(store, "poll", poll_slowly)
        earlier = group.create_task(files.look())
        await asyncio.to_thread(polled.wait, PATIENCE_S)
        put(store_of(tmp_path, "b"), 2000)
        later = [group.create_task(files.look(PATIENCE_S)) for _ in range(2)]
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({earlier, *later})
        assert files.catalogue.names == {"1000", "2000"}
        serving.cancel()


async def test_nothing_is_saved_while_a_shared_directory_does_not_answer(tmp_path: Path) -> None:
    files = files_of(store_of(tmp_path, "a"))
    assert not files.may_save(1000)
    with pytest.raises(OSError, match="has not answered"):
        _ = files.rooms_bytes
    (tmp_path / "shared").touch()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        serving = group.create_task(files.serve())
        await asyncio.sleep(0)
        await files.look()
        with pytest.raises(OSError, match="cannot use the directory"):
            _ = files.rooms_bytes
        serving.cancel()
    assert files.read_limit_s(1000) == 2.0
    files.note_read(1000, 5.01)
    assert files.read_limit_s(1000) == 20.0
    assert (
        SlotFiles(
            lambda: SlotPersistence(
                SlotStore(tmp_path / "own"), is_on=True, limits=DiskBudget(1 << 30), timeout_s=60.0
            ),
            RecordingTraffic(),
            lambda *_, **__: None,
        ).read_limit_s(1000)
        is None
    )
