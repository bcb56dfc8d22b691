"""Restored slots on the real engine: the next router knows them, and verifies them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fleet_harness import LONG, FleetHarness
from support.proxy_harness import until
from support.requests import ask

from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.upstream.upstream import Timings
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotFileHeader
from supervisor.slot_store.store import SlotStore


class Proxy:
    """A router to which the one instance of a fleet is admitted.

    Args:
        harness: With its instance up.
    """

    def __init__(self, harness: FleetHarness) -> None:
        self.router = Router()
        self.router.signals.restore_verified.connect(harness.traffic.signals.restore_verified)
        harness.traffic.fingerprints = self.router.conversation_fingerprints
        self._harness = harness
        replica = harness.replica
        snapshot = replica.instance.snapshot()
        restored = replica.slots.restored_slots(snapshot.run)
        self.router.admit(replica.upstream(snapshot, ()), restored)

    async def turn(self, *texts: str, lie: int | None = None) -> tuple[str, int | None, Timings]:
        """Have a turn answered; return the answer, the slot that was named, and its timings.

        Args:
            texts: The conversation.
            lie: The cache content that the engine is made to report.
        """
        asked = ask(*texts)
        async with self.router.lease(asked) as lease:
            slot = lease.id_slot
            said, figures = await self._harness.ask(asked.json["messages"], slot)
            cost = Timings.read(figures)
            assert cost
            reported = cost if lie is None else _without_cache(cost, lie)
            self.router.finish(lease, Completion(reported, {"content": said}))
        return said, slot, cost


def _without_cache(cost: Timings, cached: int) -> Timings:
    whole = cost.prompt_tokens + cost.cached_tokens
    return replace(cost, cached_tokens=cached, prompt_tokens=whole - cached)


async def saved(harness: FleetHarness) -> list[tuple[str, str, str]]:
    """Have two conversations saved; return the next turn of each."""
    async with harness.up():
        proxy = Proxy(harness)
        begun = [f"{word} {LONG}" for word in ("hello", "other")]
        turns = [(entry, (await proxy.turn(entry))[0], "and then?") for entry in begun]
    assert all(entry.fingerprint for entry in harness.store.list_saved("chat"))
    return turns


async def test_the_next_turn_names_the_slot_that_its_conversation_was_restored_to(
    tiny_model: Path, runtime: Path
) -> None:
    turn, _ = await saved(FleetHarness(runtime, tiny_model))
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        _, slot, cost = await Proxy(harness).turn(*turn)
        assert slot is not None
        assert cost.cached_tokens > 10 * cost.prompt_tokens
    assert not harness.emitted("slots.restore_unused")


async def test_an_engine_that_does_not_use_a_restored_slot_gets_no_more(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> SlotFileHeader:
        raise InvalidSlotFile

    monkeypatch.setattr(SlotStore, "header", broken)  # none can be tried before
    turns = await saved(FleetHarness(runtime, tiny_model))
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        proxy = Proxy(harness)
        for turn in turns:
            assert harness.replica.upstream(harness.replica.instance.snapshot(), ()).cache_key
            assert len(harness.traffic.slot_files) == 2
            await proxy.turn(*turn, lie=0)
        await until(lambda: bool(harness.emitted("slots.restore_unused")))
        assert not harness.traffic.slot_files
        assert not harness.replica.upstream(harness.replica.instance.snapshot(), ()).cache_key
        assert harness.traffic.calls.count("admit") == 2
    assert "used nothing of a restored conversation" in str(harness.replica.slots.reason)
