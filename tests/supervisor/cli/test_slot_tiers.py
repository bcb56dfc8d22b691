"""The table of tiers, with and without a daemon."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.slot_files import NOON, manifest

from proxy.cache.save_policy import ModelCounts, OperationCounts
from proxy.observe.cache_finding import Tier
from proxy.router.slots import CacheContents, TierUse
from supervisor.cli.slots import full_disk_notes
from supervisor.cli.status import tiers_text
from supervisor.daemon.cache_status import cache_status, saved_status
from supervisor.daemon.control_messages import CachesStatus, PausedRequest, SlotDiskStatus
from supervisor.slot_store.store import SlotStore

SAVED = [manifest("a", tokens=500, size_bytes=2 << 20), manifest("b", 30, size_bytes=1 << 20)]
USE = {
    Tier.SLOT: TierUse(6, 6000, 100.0),
    Tier.HOST_CACHE: TierUse(1, 500, 4.25),
    Tier.DISK: TierUse(2, 2500, 30.0),
    Tier.NONE: TierUse(3, 1000),
}


def test_each_tier_shows_its_content_and_the_time_saved() -> None:
    held = CacheContents(8, 5, 4000, 32 << 20, 3, 900, 4 << 20)
    counts: ModelCounts = {
        "save": OperationCounts(4, 1, 2000, 4 << 20, 0.08),
        "restore": OperationCounts(),
    }
    found = cache_status("chat", SAVED, contents=held, use=USE, counts=counts)
    found.skipped = {"cost": 3}
    whole = CachesStatus(
        models=[found],
        disk=SlotDiskStatus(
            size_bytes=3 << 20,
            limit_bytes=8 << 30,
            written_bytes=5 << 20,
            write_limit_bytes=32 << 30,
            paused=False,
        ),
    )
    text = tiers_text(whole, NOON + timedelta(hours=2))
    _, slot, host_cache, disk, computed, files, limits = text.splitlines()
    assert "5 conversations, 4000 tokens, 8 slots" in slot
    assert slot.endswith("6  6000 (60%)  1m 40s")
    assert "3 conversations, 900 tokens, 4.0 MiB of 32.0 MiB" in host_cache
    assert host_cache.endswith("4.2s")
    assert "2 conversations, 800 tokens, 3.0 MiB" in disk
    assert computed.split() == ["computed", "3", "1000", "(10%)", "-"]
    assert files == (
        "chat on disk: 4 saved (4.0 MiB, 20 ms each), 1 failed, 3 saves skipped (it did not pay), "
        "the oldest is 2h 00m old"
    )
    assert limits == "disk: 3.0 MiB of 8.0 GiB; written in the last hour: 5.0 MiB of 32.0 GiB"


def test_what_the_host_cache_is_believed_to_hold_is_shown() -> None:
    held = CacheContents(
        host_cache_bytes=32 << 20,
        copied_conversations=3,
        copied_tokens=900,
        copied_bytes=float(8 << 20),
    )
    found = cache_status("chat", [], contents=held, use=USE, counts=None)
    whole = replace(saved_status([]), models=[found])
    assert "3 conversations, 900 tokens, 8.0 MiB of 32.0 MiB" in tiers_text(whole, NOON)


def test_without_a_daemon_the_disk_is_shown() -> None:
    _, slot, host_cache, disk, _, files = tiers_text(saved_status(SAVED), NOON).splitlines()
    assert slot.split() == ["chat", "slot", "-", "-", "-", "-"]
    assert host_cache.split() == ["host", "cache", "-", "-", "-", "-"]
    assert "2 conversations" in disk
    assert files == "chat on disk: the oldest is 0s old"
    assert tiers_text(saved_status([]), NOON) == "no model, and nothing on disk"


@pytest.mark.parametrize(("room_bytes", "notes"), [(-1, 1), (0, 1), (1, 0)])
def test_a_full_disk_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int, notes: int
) -> None:
    monkeypatch.setattr(SlotStore, "rooms_bytes", lambda _: {"the disk": room_bytes})
    found = full_disk_notes(SlotStore(tmp_path))
    assert len(found) == notes
    assert all("the disk is full" in note and "corral slots forget" in note for note in found)


def test_a_store_without_a_directory_is_not_full(tmp_path: Path) -> None:
    assert full_disk_notes(SlotStore(tmp_path / "none")) == []


def test_paused_requests_and_the_cost_of_pauses_are_shown() -> None:
    found = cache_status("chat", [], use=USE)
    found.paused = [PausedRequest("r1", "laptop", 4.2)]
    found.handovers, found.handovers_s = 12, 0.48
    text = tiers_text(replace(saved_status([]), models=[found]), NOON)
    assert "chat: 12 times an answer went on after its batch request had given up its slot" in text
    assert "that took 0.5s in all" in text
    assert "request r1 of laptop has been paused for 4.2s; it goes on when a slot is free" in text
