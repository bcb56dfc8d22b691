"""Single slots of the real engine, saved and restored while it serves."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fleet_harness import FleetHarness, Messages
from support.proxy_harness import until

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.upstream.engine_state import SlotState
from supervisor.engine import client as client_module
from supervisor.engine.client import EngineUnreachable, ErrorResponse
from supervisor.slot_store.save_limits import SaveLimits

FIRST = ConversationFingerprint((1, 2), tuple(range(40)))
NEXT = ConversationFingerprint((1, 2, 3), tuple(range(50)))


class Storage:
    """The storage of a fleet that serves one model."""

    def __init__(self, harness: FleetHarness) -> None:
        self.harness = harness
        self.adapter = harness.fleet.slot_storage
        self.spool = harness.store.spool_path("chat.0")

    @property
    def files(self) -> dict[str, SlotFile]:
        return self.harness.traffic.slot_files

    def path(self, name: str) -> Path:
        return self.harness.store.root / "kept" / "chat" / f"{name}.slot"

    async def used(self) -> SlotState:
        """Return the slot that was used last."""
        async with self.harness.client() as client:
            found = await client_module.get_slots(client)
        assert not isinstance(found, ErrorResponse)
        return max(found, key=lambda entry: entry.task)

    async def save(self, fingerprint: ConversationFingerprint = FIRST) -> SlotState:
        """Save the slot that was used last, until it is stored."""
        slot = await self.used()
        written = await self.adapter.save("chat.0", slot.id_slot, slot.tokens, fingerprint)
        assert written
        assert written.tokens == slot.tokens
        await self.harness.fleet.slot_files.settle()
        return slot


@pytest.fixture
async def storage(tiny_model: Path, runtime: Path) -> AsyncIterator[Storage]:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        yield Storage(harness)


async def continued(storage: Storage, messages: Messages, id_slot: int) -> int:
    _, timings = await storage.harness.ask(messages, id_slot)
    return int(timings["cache_n"])


async def test_a_saved_slot_is_restored_into_another(storage: Storage) -> None:
    messages = await storage.harness.converse()
    assert storage.adapter.may_save("chat.0", 1 << 20)
    slot = await storage.save()
    (file,) = storage.files.values()
    assert file.cache_key == storage.harness.replica.cache_key
    assert file.fingerprint == FIRST
    other = 1 - slot.id_slot
    read = await storage.adapter.restore("chat.0", other, file.name)
    assert read
    assert (read.tokens, read.size_bytes) == (slot.tokens, file.size_bytes)
    assert await continued(storage, messages, other) >= slot.tokens - 20
    assert not list(storage.spool.iterdir())
    # The next turn of the same conversation takes the place of this one.
    await storage.save(NEXT)
    (later,) = storage.files.values()
    assert later.tokens > file.tokens
    assert not storage.path(file.name).exists()
    assert not storage.harness.emitted("slots.save_failed")


async def test_what_the_engine_does_not_hold_is_not_kept(storage: Storage) -> None:
    await storage.harness.converse()
    slot = await storage.used()
    assert not await storage.adapter.save("chat.0", slot.id_slot, slot.tokens + 3, FIRST)
    assert not await storage.adapter.save("chat.1", slot.id_slot, slot.tokens, FIRST)
    await storage.harness.fleet.slot_files.settle()
    assert not storage.files
    assert not list(storage.spool.iterdir())


async def test_a_file_that_cannot_be_used_is_removed(storage: Storage) -> None:
    await storage.harness.converse()
    slot = await storage.save()
    (name,) = storage.files
    storage.path(name).write_bytes(storage.path(name).read_bytes()[:-1] + b"!")
    for _ in range(2):
        assert not await storage.adapter.restore("chat.0", slot.id_slot, name)
    assert not storage.files
    (event,) = storage.harness.emitted("slots.quarantined")
    assert event["reason"] == "its content was altered"
    await storage.save()
    storage.harness.store.forget("chat")  # as a command beside the daemon does
    (name,) = storage.files
    assert not await storage.adapter.restore("chat.0", slot.id_slot, name)
    assert not storage.files
    assert len(storage.harness.emitted("slots.quarantined")) == 1
    shutil.rmtree(storage.harness.store.root)
    slot = await storage.save()
    assert await storage.adapter.restore("chat.0", slot.id_slot, *storage.files)


async def test_a_full_disk_is_one_warning_and_a_pause(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    await storage.harness.converse()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            await storage.save()
    assert not storage.files
    assert not storage.adapter.may_save("chat.0", 1)
    (event,) = storage.harness.emitted("slots.save_failed")
    assert event["reason"].endswith("No space left on device; more is saved in 60 s")
    await storage.save()
    assert len(storage.files) == 1


async def test_a_nearly_full_disk_is_one_warning(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.harness.store.spool("chat.0")
    usage = shutil.disk_usage(storage.spool)._replace(free=200 * 1024**2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        assert not any(storage.adapter.may_save("chat.0", 1) for _ in range(3))
    (event,) = storage.harness.emitted("slots.disk_full")
    assert str(event["reason"]).startswith("the disk has too little room: 0 B beside its reserve")
    assert storage.adapter.may_save("chat.0", 1)


async def test_a_slow_disk_keeps_the_file_and_gets_no_more(storage: Storage) -> None:
    slow = SaveLimits(slow_bytes_per_s=1 << 60, measured_min_bytes=0)
    storage.harness.fleet.slot_files.limits = slow
    await storage.harness.converse()
    await storage.save()
    assert len(storage.files) == 1
    assert not storage.adapter.may_save("chat.0", 1)
    (event,) = storage.harness.emitted("slots.save_failed")
    assert "the disk stores" in event["reason"]


async def test_a_disk_that_refuses_to_be_read_keeps_its_files(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    await storage.harness.converse()
    slot = await storage.save()
    (name,) = storage.files
    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        assert not await storage.adapter.restore("chat.0", slot.id_slot, name)
    assert list(storage.files) == [name]
    (event,) = storage.harness.emitted("slots.restore_failed")
    assert "Read-only file system" in event["reason"]


async def test_a_client_that_leaves_during_a_restore_leaves_nothing_behind(
    storage: Storage,
) -> None:
    await storage.harness.converse()
    slot = await storage.save()
    (name,) = storage.files
    pid = storage.harness.replica.instance.snapshot().pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.TaskGroup() as group:
        restoring = group.create_task(storage.adapter.restore("chat.0", slot.id_slot, name))
        await until(lambda: any(storage.spool.iterdir()))
        restoring.cancel()
    os.kill(pid, signal.SIGCONT)
    await until(lambda: not any(storage.spool.iterdir()))
    assert list(storage.files) == [name]
    assert await storage.adapter.restore("chat.0", slot.id_slot, name)


async def test_a_file_that_an_engine_did_not_survive_is_not_restored_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(*_: object) -> int:
        raise EngineUnreachable("it ended")

    await storage.harness.converse()
    slot = await storage.save()
    (name,) = storage.files
    monkeypatch.setattr(client_module, "restore", ends)
    assert not await storage.adapter.restore("chat.0", slot.id_slot, name)
    assert not storage.files
    (event,) = storage.harness.emitted("slots.quarantined")
    assert "did not answer" in event["reason"]
    assert not storage.harness.emitted("slots.restore_failed")
    assert not storage.harness.store.list_saved()
    assert not list(storage.spool.iterdir())
