"""The tier for which the tokens of a prompt count, and the time saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.requests import ask, upstream

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.holders import Conversation, SavedPrompt
from proxy.observe.cache_finding import Cause, NoFile, Tier
from proxy.observe.explanation import cache_sentence
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.upstream.upstream import Node, Timings

ENGINE = replace(upstream("chat.0"), host_cache_bytes=1e9)
FILE = SlotFile("a", "key", 700, 9_000_000, ConversationFingerprint())
SAVED = SavedPrompt(FILE, 700, 40, 10, is_whole=True)


def found(router: Router, lease: Lease, cached: int) -> Tier | None:
    """Answer a request of 800 tokens on an engine that computes 100 a second."""
    computed = 800 - cached
    router.finish(lease, Completion(Timings(cached, computed, computed * 10.0, 4, 40.0)))
    return lease.tier


async def test_tokens_count_for_the_tier_that_held_them() -> None:
    router = Router()
    router.admit(ENGINE)
    for has_own, restored, cached, tier in (
        (True, None, 700, Tier.SLOT),
        (False, None, 600, Tier.HOST_CACHE),
        (False, SAVED, 700, Tier.DISK),
        (False, SAVED, 0, Tier.NONE),
        (None, None, 100, Tier.SLOT),  # the engine chose the slot
    ):
        async with router.lease(ask("hello")) as lease:
            lease.has_own_slot, lease.restored = has_own, restored
            lease.restore_s = 0.5 if restored else 0.0
            assert found(router, lease, cached) is tier
    use = router.cache_use.models["chat"]
    assert {tier: entry.prompts for tier, entry in use.items()} == {
        Tier.SLOT: 2, Tier.HOST_CACHE: 1, Tier.DISK: 1, Tier.NONE: 1,
    }  # fmt: skip
    assert use[Tier.SLOT].tokens == 800
    assert use[Tier.NONE].tokens == 100 + 200 + 100 + 800 + 700
    assert use[Tier.DISK].saved_s == pytest.approx(7.0 - 0.5)


async def test_what_a_process_began_with_was_on_disk() -> None:
    router = Router()
    router.admit(ENGINE)
    async with router.lease(ask("hello")) as lease:
        lease.has_own_slot, lease.restored_tokens = True, 700
        assert found(router, lease, 700) is Tier.DISK


async def test_an_engine_without_a_host_cache_found_all_in_its_slots() -> None:
    router = Router()
    router.admit(upstream("chat.0"))
    async with router.lease(ask("hello")) as lease:
        lease.has_own_slot = False
        assert found(router, lease, 600) is Tier.SLOT


async def test_where_another_machine_found_a_prompt_is_not_known() -> None:
    router = Router()
    router.admit(replace(ENGINE, node=Node("barn", "chat")))
    async with router.lease(ask("hello")) as lease:
        assert found(router, lease, 600) is None
    assert not router.cache_use.models


async def test_a_finding_says_that_a_prompt_came_from_disk() -> None:
    router = Router()
    router.admit(ENGINE)
    async with router.lease(ask("hello " * 300)) as lease:
        lease.has_own_slot, lease.restored, lease.restore_s = False, SAVED, 0.5
        found(router, lease, 700)
    assert lease.finding
    assert lease.finding.as_fields()["tier"] == "disk"
    assert (lease.finding.restore_ms, lease.finding.saved_ms) == (500, 6500)


async def lost(router: Router, *, restore_s: float = 0.0, reason: NoFile | None = None) -> Lease:
    """Return the lease of a second turn that finds nothing of the first."""
    story, reply = "hello " * 300, {"role": "assistant", "content": "yes"}
    completed = Completion(Timings(0, 800, 8000.0, 4, 40.0), reply)
    async with router.lease(ask(story)) as first:
        router.finish(first, completed)
    assert isinstance(first.conversation, Conversation)
    first.conversation.no_file = reason
    async with router.lease(ask(story, "yes", "and then?")) as lease:
        lease.has_own_slot, lease.restore_s = False, restore_s
        router.finish(lease, completed)
    return lease


async def test_a_finding_says_why_lost_tokens_were_on_no_disk() -> None:
    for key, restore_s, reason, expected in (
        ("", 0.0, None, NoFile.OFF),
        ("key", 0.0, NoFile.COST, NoFile.COST),
        ("key", 0.2, NoFile.COST, NoFile.FAILED),
        ("key", 0.0, None, None),
    ):
        router = Router()
        router.admit(replace(ENGINE, cache_key=key))
        finding = (await lost(router, restore_s=restore_s, reason=reason)).finding
        assert finding
        assert (finding.cause, finding.no_file) == (Cause.SLOT_EVICTED, expected)
        assert ("on disk did not pay" in cache_sentence(finding)) is (expected is NoFile.COST)
