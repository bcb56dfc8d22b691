"""Files of prefixes that conversations share: one of each, and not too many."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.instance_harness import RecordingTraffic
from support.slot_files import manifest, write

from proxy.cache.fingerprint import ConversationFingerprint
from supervisor.slot_store.file_index import Catalogue, find_prefix
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.save_limits import SpooledFile
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.store_config import SlotPersistence

BUDGET = DiskBudget(1 << 30, max_age=timedelta(days=36_500))


def text(*blocks: int, turns: tuple[int, ...] = ()) -> str:
    return ConversationFingerprint(turns, blocks).to_ascii()


def test_a_prefix_has_a_file_unless_much_more_or_much_less_is_in_it() -> None:
    catalogue = Catalogue(RecordingTraffic())
    key = catalogue.add(manifest("a", fingerprint=text(*range(1, 60)))).file.cache_key
    catalogue.add(manifest("b", fingerprint=text(*range(100, 200), turns=(1,))))
    one = catalogue.get("a")
    assert find_prefix(catalogue, key, tuple(range(1, 60)), 256) is one
    assert find_prefix(catalogue, key, (*range(1, 55), *range(300, 310)), 256) is one
    assert find_prefix(catalogue, key, tuple(range(1, 90)), 256) is None
    assert find_prefix(catalogue, key, tuple(range(1, 40)), 256) is None
    assert find_prefix(catalogue, key, tuple(range(100, 200)), 256) is None
    assert find_prefix(catalogue, "other", tuple(range(1, 60)), 256) is None


def test_the_slot_of_a_prefix_is_not_saved_once_more() -> None:
    catalogue, unknown = Catalogue(RecordingTraffic()), ConversationFingerprint()
    key = catalogue.add(manifest("a", fingerprint=text(1, 2), tokens=300)).file.cache_key
    catalogue.add(manifest("b", fingerprint="", tokens=400))
    assert catalogue.holds(key, 300, unknown)
    assert not catalogue.holds(key, 301, unknown)
    assert not catalogue.holds(key, 400, unknown)


async def test_of_seventeen_prefixes_the_one_used_least_recently_goes(tmp_path: Path) -> None:
    store, traffic = SlotStore(tmp_path / "slots"), RecordingTraffic()
    persistence = SlotPersistence(store, is_on=True, limits=BUDGET, timeout_s=9)
    files = SlotFiles(lambda: persistence, traffic, lambda *_, **__: None)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(files.serve())
        await files.wait_loaded()
        for at in range(17):
            spooled = store.spool("chat.0") / f"{at}.new"
            written = write(spooled, range(1000 * at, 1000 * at + 300))
            one = manifest(f"{at}", at, fingerprint=text(*range(1000 * at, 1000 * at + 40)))
            one = replace(one, size_bytes=written.size_bytes)
            files.store(SpooledFile(spooled, one, 0.01, store, BUDGET), pytest.fail)
            await files.settle()
        serving.cancel()
    assert traffic.slot_files.keys() == {f"{at}" for at in range(1, 17)}
