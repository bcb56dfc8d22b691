from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from support.samples import engine, model
from support.slot_files import IDENTITY, NOON, catalogued, manifest

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.upstream.engine_state import SlotState
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan
from supervisor.slot_store.file_index import CataloguedFile, key_digest
from supervisor.slot_store.policy import (
    DiskBudget,
    auto_budget_bytes,
    fill_order,
    is_redundant,
    to_restore,
    unsupported_reason,
    worth_saving,
)
from supervisor.slot_store.slot_file import SlotFileHeader

BUDGET = DiskBudget(10_000, model_share=1, files=4, files_a_model=3)
MUCH = 1 << 40
OLD = SlotFileHeader(2, tuple(range(1000)))


def slot(id_slot: int, task: int = -1, tokens: int = 0, *, is_busy: bool = False) -> SlotState:
    return SlotState(id_slot, task, tokens, is_busy)


def saved(
    *slots: SlotState, known: dict[int, int | None] | None = None, room: int = MUCH
) -> list[int]:
    return [slot.id_slot for slot in worth_saving(slots, known or {}, BUDGET, 1, room, IDENTITY)]


def test_the_most_recently_used_is_saved_first() -> None:
    assert saved(slot(0, task=3, tokens=300), slot(1, task=9, tokens=300)) == [1, 0]


@pytest.mark.parametrize(
    "slot_state",
    [
        slot(0, task=1, tokens=255),
        slot(0, is_busy=True, task=1, tokens=300),
        slot(0),
    ],
)
def test_what_is_short_busy_or_unused_is_not_saved(slot_state: SlotState) -> None:
    assert saved(slot_state) == []


def test_what_is_saved_already_is_not_saved_again_until_it_is_used() -> None:
    assert saved(slot(0, task=7, tokens=300), known={0: 7}) == []
    assert saved(slot(0, task=8, tokens=300), known={0: 7}) == [0]


def test_a_conversation_without_room_is_left_out_and_smaller_ones_are_not() -> None:
    large, small = slot(0, task=9, tokens=900), slot(1, task=3, tokens=300)
    assert saved(large, small, room=500) == [1]


def test_a_recurrent_state_takes_room_too() -> None:
    for state_bytes, is_saved in ((200, True), (201, False)):
        key = replace(IDENTITY, state_bytes=state_bytes)
        found = worth_saving([slot(0, task=1, tokens=300)], {}, BUDGET, 1, 500, key)
        assert bool(found) is is_saved


@pytest.mark.parametrize(("window", "is_saved"), [(299, True), (300, False)])
def test_a_slot_shorter_than_the_window_is_not_saved(window: int, *, is_saved: bool) -> None:
    key = replace(IDENTITY, window=window)
    found = worth_saving([slot(0, task=1, tokens=300)], {}, BUDGET, 1, MUCH, key)
    assert bool(found) is is_saved


def restored(
    kept: Iterable[CataloguedFile],
    replica: tuple[int, int] = (0, 1),
    most: int = 2,
    ctx: int = 2048,
) -> list[str]:
    key = key_digest("chat", IDENTITY)
    return [entry.file.name for entry in to_restore(kept, key, replica=replica, most=most, ctx=ctx)]


def test_what_was_used_last_is_put_back_first_into_as_many_slots_as_there_are() -> None:
    kept = [catalogued(name, minutes) for name, minutes in (("a", 1), ("b", 3), ("c", 2))]
    assert restored(kept) == ["b", "c"]


def test_conversations_that_the_proxy_knows_are_restored_first() -> None:
    known = ConversationFingerprint((1,), (2,)).to_ascii()
    kept = [
        catalogued("prompt", 9),
        catalogued("old", 1, fingerprint=known),
        catalogued("late", 2, fingerprint=known),
    ]
    assert restored(kept) == ["late", "old"]


def test_what_belongs_elsewhere_or_leaves_no_room_for_an_answer_is_not_put_back() -> None:
    assert restored([catalogued(identity=replace(IDENTITY, engine="b11434"))]) == []
    assert restored([catalogued(model="other")]) == []
    assert restored([catalogued()], ctx=300) == []


def test_each_replica_restores_its_own_slots_and_the_rest_is_divided() -> None:
    kept = [catalogued(str(number), replica=number) for number in range(4)]
    names = [set(restored(kept, (number, 2), most=9)) for number in range(2)]
    assert names == [{"0", "2"}, {"1", "3"}]


def test_each_replica_begins_with_its_conversations_and_with_the_prefixes_of_all() -> None:
    own = ConversationFingerprint((1,), (2,))
    moved = ConversationFingerprint((3,), (4,))
    prefix = ConversationFingerprint((), (5,))
    kept = [
        catalogued("prefix", 9, replica=1, fingerprint=prefix.to_ascii()),
        catalogued("probe", 9),
        catalogued("own", 1, fingerprint=own.to_ascii()),
        catalogued("moved", 2, fingerprint=moved.to_ascii()),
        catalogued("other", 2, replica=1, fingerprint=own.to_ascii()),
    ]
    key = key_digest("chat", IDENTITY)
    chosen = to_restore(kept, key, replica=(0, 2), most=9, ctx=2048, is_elsewhere=moved.__eq__)
    assert [entry.file.name for entry in chosen] == ["own", "prefix", "probe"]


def test_the_slot_that_is_given_away_last_is_filled_first() -> None:
    assert fill_order([slot(0), slot(1), slot(2), slot(3, task=0)]) == [3, 0, 1, 2]


def test_a_later_turn_takes_the_place_of_an_earlier_one_though_some_tokens_differ() -> None:
    later = SlotFileHeader(2, (*range(900), *range(2000, 2400)))
    assert is_redundant(later, NOON, {manifest(): OLD}, 256) == (False, [manifest()])


def test_another_conversation_with_the_same_beginning_is_kept_beside() -> None:
    branch = SlotFileHeader(2, (*range(500), *range(2000, 2800)))
    assert is_redundant(branch, NOON, {manifest(): OLD}, 256) == (False, [])


def test_what_is_held_already_is_not_kept_twice() -> None:
    assert is_redundant(SlotFileHeader(2, OLD.tokens[:500]), NOON, {manifest(): OLD}, 256) == (
        True,
        [],
    )


def test_an_older_state_does_not_push_out_a_newer_one() -> None:
    stale = SlotFileHeader(2, (*range(900), *range(2000, 2050)))
    assert is_redundant(stale, NOON, {manifest(minutes=1): OLD}, 256) == (True, [])


def reason_for(chosen: dict[str, Any] | None = None, *, build: str = "b10434", **facts: Any) -> str:
    gguf, made = model(**facts), engine(build)
    memory_inputs = MemoryInputs(gguf, chosen or {}, made, frozenset(), None)
    plan = Plan("chat", made, gguf, (), (), (), slots=2, ctx_size=2048, memory_inputs=memory_inputs)
    return unsupported_reason(plan) or ""


@pytest.mark.parametrize(
    ("chosen", "facts", "reason"),
    [
        ({}, {}, ""),
        ({}, {"sliding_window": 512}, ""),
        ({}, {"recurrent": True}, ""),
        ({}, {"kv_heads": (3, 0, 3)}, ""),
        ({"embedding": True}, {}, "no conversations"),
        ({"mmproj": "a.gguf"}, {}, ""),
        ({"spec-draft-model": "a.gguf", "spec-type": "draft-simple"}, {}, "draft"),
        ({"spec-type": "draft-mtp"}, {}, ""),
        ({"spec-type": "draft-mtp", "spec-draft-model": "a.gguf"}, {}, "draft"),
        ({"spec-draft-model": "a.gguf", "cache-ram": 0}, {}, ""),
        ({"spec-type": "ngram-mod,draft-eagle3"}, {}, "draft"),
        ({"spec-type": "ngram-mod"}, {}, ""),
        ({"spec-type": "none"}, {}, ""),
        ({"slot-prompt-similarity": 0, "cache-ram": 0}, {}, "cache-ram"),
        ({"slot-prompt-similarity": 0, "cache-ram": 64}, {}, ""),
        ({"slot-prompt-similarity": 0.5, "cache-ram": 0}, {}, ""),
        ({"cache-ram": 0}, {}, ""),
    ],
)
def test_slots_that_a_restore_would_not_help_are_not_saved(
    chosen: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    found = reason_for(chosen, **facts)
    assert bool(found) == bool(reason)
    assert reason in found


GIB = 1024**3


@pytest.mark.parametrize(
    ("free_gib", "used_gib", "budget_gib"),
    [
        (64, 0, 16),  # a quarter of the room
        (48, 16, 16),  # files that were saved meanwhile do not change it
        (8, 16, 6),  # another program filled the disk: some files are deleted
        (2, 0, 1),  # a file that does not fit beside the reserve of the disk is not saved
        (4096, 0, 256),
    ],
)
def test_an_automatic_budget_follows_the_room_of_the_disk(
    free_gib: int, used_gib: int, budget_gib: int
) -> None:
    assert auto_budget_bytes(free_gib * GIB, used_gib * GIB) == budget_gib * GIB
