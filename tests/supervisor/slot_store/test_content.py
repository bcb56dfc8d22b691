"""The slot store with keys."""

import errno
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet_harness import FleetHarness
from support.instance_harness import RecordingTraffic
from support.slot_files import manifest, write

from proxy.cache.fingerprint import ConversationFingerprint, decode_fingerprint
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings, SupervisorSettings
from supervisor.slot_store import store_config
from supervisor.slot_store.encryption import (
    PLAIN,
    SlotContent,
    SlotKey,
    new_key,
    with_newest,
)
from supervisor.slot_store.file_index import key_digest
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotKeyMissing
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.store_config import SlotPersistence, slot_persistence
from supervisor.system.paths import Directories

OLD, NEW = new_key(), new_key()
PLENTY = DiskBudget(1 << 30)


def content(*keys: SlotKey) -> SlotContent:
    return SlotContent({key.id: key for key in keys})


def store_with(tmp_path: Path, moves: SlotContent) -> SlotStore:
    return SlotStore(tmp_path / "slots", moves, tmp_path / "memory")


def put(store: SlotStore, first: int = 1000) -> Manifest:
    spooled = store.spool("chat.0") / f"{first}.new"
    moved = write(spooled, range(first, first + 300))
    unverified = manifest(
        spooled.stem,
        tokens=moved.tokens,
        size_bytes=moved.size_bytes,
        fingerprint=ConversationFingerprint((first,), (1, 2)).to_ascii(),
    )
    found, _ = store.add(spooled, unverified, (), PLENTY.tokens_min)
    assert found
    return found


def path_of(store: SlotStore, manifest: Manifest) -> Path:
    return store.root / "kept" / manifest.model / f"{manifest.name}.slot"


def persistence_of(store: SlotStore) -> SlotPersistence:
    return SlotPersistence(store, is_on=True, limits=PLENTY, timeout_s=1.0)


def taken(store: SlotStore, manifest: Manifest) -> bytes:
    link = store.check_out(manifest, store.spool("chat.0"), manifest.identity)
    found = link.read_bytes()
    link.unlink()
    return found


def test_a_file_is_encrypted_in_the_store_and_plain_in_the_spool(tmp_path: Path) -> None:
    store, plain = store_with(tmp_path, content(NEW)), store_with(tmp_path / "b", PLAIN)
    one, same = put(store), put(plain)
    assert one.key_id == NEW.id
    tokens = struct.pack("<4i", *range(1100, 1104))
    assert tokens in path_of(plain, same).read_bytes()
    assert tokens not in path_of(store, one).read_bytes()
    assert taken(store, one) == taken(plain, same)
    assert store.header(one) == plain.header(same)
    assert store.list_saved() == [one]
    assert one.fingerprint not in path_of(store, one).with_suffix(".json").read_text()
    assert plain.list_saved() == [same]
    assert same.fingerprint in path_of(plain, same).with_suffix(".json").read_text()
    assert [path for path in (tmp_path / "memory").rglob("*") if path.is_file()] == []


def test_older_keys_still_decrypt_and_files_without_a_key_are_taken(tmp_path: Path) -> None:
    plain = put(store_with(tmp_path, PLAIN), 1000)
    old = put(store_with(tmp_path, content(OLD)), 2000)
    store = store_with(tmp_path, content(NEW, OLD))
    assert all(taken(store, case) for case in (plain, old))
    assert put(store, 3000).key_id == NEW.id


@pytest.mark.parametrize("moves", [content(NEW), PLAIN])
async def test_a_file_of_another_key_waits_for_its_key(tmp_path: Path, moves: SlotContent) -> None:
    one = put(store_with(tmp_path, content(OLD)))
    persistence = persistence_of(store_with(tmp_path, moves))
    events: list[tuple[str, Any]] = []
    files = SlotFiles(
        lambda: persistence,
        RecordingTraffic(),
        lambda name, /, **fields: events.append((name, fields)),
    )
    key = key_digest(one.model, one.identity)
    conversation = decode_fingerprint(one.fingerprint)
    await files.reconcile()
    assert events == [("slots.key_missing", {"files": 1, "keys": [OLD.id]})]
    assert len(files.catalogue) == 1  # it counts in the budget
    assert files.catalogue.files_of_conversation(key, conversation) == []
    with pytest.raises(SlotKeyMissing, match=f"its key {OLD.id} is not at hand"):
        taken(persistence.store, one)
    persistence = persistence_of(store_with(tmp_path, content(NEW, OLD)))
    files.check_keys()
    await files.reconcile()
    (found,) = files.catalogue.files_of_conversation(key, conversation)
    assert found.manifest.name == one.name
    persistence = replace(persistence, problem="its key file is gone")
    files.check_keys()
    assert events[1:] == [("slots.key_unusable", {"reason": "its key file is gone"})]
    assert not files.may_save(1)


def test_a_file_belongs_to_its_manifest(tmp_path: Path) -> None:
    store = store_with(tmp_path, content(NEW))
    one, other = put(store, 1000), put(store, 2000)
    shutil.copy(path_of(store, other), path_of(store, one))
    with pytest.raises(InvalidSlotFile, match="altered"):
        taken(store, one)
    with pytest.raises(InvalidSlotFile, match="altered"):
        store.header(one)


def test_a_truncated_file_is_refused_by_its_size(tmp_path: Path) -> None:
    store = store_with(tmp_path, content(NEW))
    one = put(store)
    path_of(store, one).write_bytes(path_of(store, one).read_bytes()[:-1])
    with pytest.raises(InvalidSlotFile, match="bytes, not"):
        taken(store, one)


def test_a_full_spool_is_not_the_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(tmp_path, content(NEW))
    one = put(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert store.room_bytes() < 0
    assert [*store.rooms_bytes()] == ["the disk", f"the memory of {tmp_path / 'memory'}"]
    with pytest.raises(OSError, match="has 10 bytes left") as caught:
        taken(store, one)
    assert caught.value.errno == errno.ENOSPC


def test_what_engines_left_on_the_disk_is_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, content(NEW))
    left = store.root / "spool" / "chat.0"
    left.mkdir(parents=True)
    (left / "half.new").write_bytes(b"text")
    store.clean_up()
    assert not left.exists()
    (store.spool("chat.0") / "half.new").write_bytes(b"text")
    store.close()
    assert not (tmp_path / "memory").exists()
    plain = SlotStore(tmp_path / "slots")
    plain.spool("chat.0")
    plain.close()
    assert plain.spool_path("chat.0").exists()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "slots.key"
    path.write_text(with_newest(NEW, ""))
    path.chmod(0o600)
    return path


def persistence(tmp_path: Path, **settings: Any) -> SlotPersistence:
    return slot_persistence(Directories(*[tmp_path] * 5), SupervisorSettings(**settings))


def test_without_memory_or_key_nothing_is_saved(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = persistence(tmp_path, slots_key_file=key_file)
    assert (right.problem, right.encrypts) == ("", True)
    wrong = persistence(tmp_path, slots_key_file=tmp_path / "none")
    assert "none cannot be read: No such file" in wrong.problem
    assert wrong.memory_spool  # for when it comes back
    off = persistence(tmp_path, slots_key_file=tmp_path / "none", persist_slots=False)
    assert not off.problem
    monkeypatch.setattr(store_config, "memory_directory", lambda *_: None)
    nowhere = persistence(tmp_path, slots_key_file=key_file)
    assert "no file system in memory" in nowhere.problem


async def test_a_conversation_continues_and_its_tokens_were_on_no_disk(
    tiny_model: Path, runtime: Path, tmp_path: Path, key_file: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model, supervisor={"slots_key_file": key_file})
    async with harness.up():
        messages = await harness.converse()
        expected, _ = await harness.ask(messages)
    (kept,) = harness.store.list_saved("chat")
    tokens = harness.store.header(kept).tokens
    words = struct.pack("<8i", *tokens[100:108])
    files = [path for path in runtime.rglob("*") if path.is_file()]
    assert path_of(harness.store, kept) in files
    assert not [path for path in files if words in path.read_bytes()]
    again = FleetHarness(runtime, tiny_model, supervisor={"slots_key_file": key_file})
    async with again.up():
        said, timings = await again.ask(messages)
    assert said == expected
    assert timings["cache_n"] >= kept.tokens - 20
    shutil.rmtree(str(again.planner.launches.slot_persistence.memory_spool))


async def test_a_start_without_room_in_memory_says_so(
    tiny_model: Path, runtime: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FleetHarness(runtime, tiny_model, supervisor={"slots_key_file": key_file})
    async with harness.up():
        await harness.converse()
    memory = str(harness.planner.launches.slot_persistence.memory_spool)
    usage = shutil.disk_usage

    def full(path: Path) -> Any:
        return SimpleNamespace(free=10) if str(path).startswith(memory) else usage(path)

    monkeypatch.setattr(shutil, "disk_usage", full)
    async with harness.up():
        pass
    assert "has 10 bytes left" in harness.emitted("slots.restore_failed")[0]["reason"]
    assert harness.emitted("slots.quarantined") == []
    assert len(harness.store.list_saved("chat")) == 1
    shutil.rmtree(memory)


def test_an_engine_is_replaced_when_its_spool_changes(
    tiny_model: Path, tmp_path: Path, key_file: Path
) -> None:
    def spool(**supervisor: Any) -> Path | None:
        settings = Settings.model_validate(
            {"models": {"chat": {"path": tiny_model}}, "supervisor": supervisor}
        )
        planner = LaunchPlanner(settings, Directories(*[tmp_path] * 5))
        (place,) = planner.replicas_of("chat")
        return planner.fingerprint(place, planner.engine_at(place)).spool

    assert spool() is None
    assert spool(slots_key_file=key_file)
