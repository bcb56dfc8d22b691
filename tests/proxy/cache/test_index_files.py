"""Beliefs about slot files, and about conversations that have left their slots."""

from __future__ import annotations

from dataclasses import replace

from support.requests import ask, upstream

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.index import CacheHint, PrefixIndex, most_tokens
from proxy.cache.prompt import Prompt

ONE, OTHER = (replace(upstream(name), can_name_slots=True, cache_key="key") for name in "ab")


def prompt(*texts: str) -> Prompt:
    found = ask(*texts).prompt
    assert found
    return found


STORY = "a long story of a river and a stone " * 40
FIRST, NEXT = prompt(STORY), prompt(STORY, "verse", "and then?")
OTHER_FIRST = prompt("another tale of a king " * 40)


def begun() -> PrefixIndex:
    """Return an index of two instances, the first of which has answered FIRST."""
    index = PrefixIndex(1000)
    index.register(ONE)
    index.register(OTHER)
    index.assign(ONE, FIRST, None, CacheHint())
    return index


def in_slot(index: PrefixIndex) -> None:
    slot_map, conversation = index.slot_maps["a"], index.look_up(FIRST, None).conversation
    slot = slot_map.reserve(object(), None, 0.0)
    assert slot
    assert conversation
    slot_map.release(slot.holder, 0.0)
    slot_map.set_conversation(slot, conversation, 400)


def test_an_instance_that_holds_a_conversation_in_no_slot_does_not_own_it() -> None:
    index = begun()
    hint = index.look_up(NEXT, None)
    assert hint.conversation
    assert hint.owner is None
    assert hint.cached_tokens(index.bit("a")) == 0
    in_slot(index)
    hint = index.look_up(NEXT, None)
    assert hint.owner == "a"
    assert hint.cached_tokens(index.bit("a")) > 300


def test_an_instance_owns_the_conversations_in_its_host_cache() -> None:
    index = PrefixIndex(1000)
    index.register(replace(ONE, slots=1, token_bytes=1000, host_cache_bytes=1e6))
    index.assign(ONE, FIRST, None, CacheHint())
    in_slot(index)
    slot_map = index.slot_maps["a"]
    slot = slot_map.reserve(object(), None, 0.0)
    assert slot
    slot_map.mark_sent(slot, is_named=False, blocks=OTHER_FIRST.blocks)
    slot_map.release(slot.holder, 0.0)
    assert index.look_up(NEXT, None).owner == "a"
    slot = slot_map.reserve(object(), None, 0.0)
    assert slot
    conversation = index.look_up(NEXT, None).conversation
    slot_map.mark_sent(slot, is_named=False, conversation=conversation, blocks=NEXT.blocks)
    assert index.look_up(NEXT, None).owner is None


def test_a_file_is_worth_the_same_to_all_that_can_restore_it() -> None:
    index = begun()
    in_slot(index)
    file = SlotFile(
        "f", "key", 340, 4_000_000, ConversationFingerprint(FIRST.turn_hashes, FIRST.blocks)
    )
    index.files.add(file)
    hint = index.look_up(NEXT, None)
    held, saved = most_tokens(hint.held, index.bit("a")), most_tokens(hint.saved, index.bit("b"))
    assert held > saved > 330
    assert hint.cached_tokens(index.bit("a")) == held
    assert hint.cached_tokens(index.bit("b")) == saved
    assert most_tokens(hint.held, index.bit("b")) == 0


def test_a_file_that_takes_as_long_to_read_is_worth_nothing() -> None:
    index = begun()
    file = SlotFile("f", "key", 340, 4_000_000, ConversationFingerprint(FIRST.turn_hashes))
    index.files.add(file)
    index.files.set_restore_cost("key", 400 / 500 / 4_000_000)
    assert index.look_up(NEXT, None).saved == []


def test_other_instances_are_not_doubted() -> None:
    index = PrefixIndex(1000)
    index.register(replace(ONE, cache_key=""))
    index.assign(ONE, FIRST, None, CacheHint())
    assert index.look_up(NEXT, None).owner == "a"
