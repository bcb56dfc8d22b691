"""Beliefs about caches: noted, corrected, forgotten, bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import ask, upstream

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.cache.holders import Conversation
from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import Prompt, read_prompt
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Timings, Upstream

SYSTEM = "You write verse, and nothing but verse. " * 20


def prompt(*texts: str) -> Prompt:
    read = ask(*texts).prompt
    assert read
    return read


def cached_tokens(prefix_index: PrefixIndex, name: str, asked: Prompt) -> int:
    return prefix_index.look_up(asked, None).cached_tokens(prefix_index.bit(name))


def owner(prefix_index: PrefixIndex, asked: Prompt, session: int | None) -> str | None:
    return prefix_index.look_up(asked, session).owner


def assign(
    prefix_index: PrefixIndex, given: Upstream, asked: Prompt, session: int | None
) -> Conversation:
    hint = prefix_index.look_up(asked, session)
    return prefix_index.assign(given, asked, session, hint)


def computed(
    prefix_index: PrefixIndex, name: str, asked: Prompt, expected: int = 0, cached: int = 0
) -> None:
    assign(prefix_index, upstream(name), asked, None)
    prefix_index.record(name, asked, expected, Timings(cached, 10, 1.0, 1, 1.0), None)


def belief(*names: str, prefix_index_max_blocks: int = 1000) -> PrefixIndex:
    prefix_index = PrefixIndex(prefix_index_max_blocks)
    for name in names:
        prefix_index.register(upstream(name))
    return prefix_index


def test_a_holder_of_a_prompt_holds_the_parts_that_others_share() -> None:
    prefix_index = belief("a", "b")
    assign(prefix_index, upstream("a"), prompt(SYSTEM + "one"), None)
    other = prompt(SYSTEM + "two")
    assert 0.8 * other.tokens < cached_tokens(prefix_index, "a", other) <= other.tokens
    assert cached_tokens(prefix_index, "b", other) == 0


@pytest.mark.parametrize(("resumable", "found"), [(1, [3]), (2, [2, 3])])
def test_a_recurrent_model_goes_on_only_from_the_latest_prompts(
    resumable: int, found: list[int]
) -> None:
    prefix_index = PrefixIndex(1000)
    recurrent = replace(upstream("a"), resumable_prompts=resumable)
    prefix_index.register(recurrent)
    turns = [SYSTEM, "verse " * 40, "two " * 40, "more " * 40, "three " * 40]
    prompts = [prompt(*turns[:count]) for count in (1, 3, 5)]
    for asked in prompts:
        assign(prefix_index, recurrent, asked, None)
        computed(prefix_index, "a", asked)
    edited = [prompt(*turns[:count], "else " * 40) for count in (1, 3, 5)]
    held = [cached_tokens(prefix_index, "a", asked) for asked in edited]
    assert [number for number, tokens in enumerate(held, 1) if tokens] == found
    assert 0.9 * prompts[2].tokens < held[2] <= prompts[2].tokens
    assert cached_tokens(prefix_index, "a", prompt(SYSTEM + "another")) == 0


def test_a_conversation_is_known_by_its_history_with_our_answer() -> None:
    prefix_index = belief("a")
    first = prompt("one")
    assign(prefix_index, upstream("a"), first, None)
    prefix_index.record("a", first, 0, None, {"content": "verse"})
    assert owner(prefix_index, prompt("one", "verse", "two"), None) == "a"
    assert owner(prefix_index, prompt("one", "prose", "two"), None) == "a"  # by its last question
    assert owner(prefix_index, prompt("other", "verse", "two"), None) is None


def test_a_conversation_is_known_by_its_name_too() -> None:
    prefix_index = belief("a")
    assign(prefix_index, upstream("a"), prompt("one"), 7)
    assert owner(prefix_index, prompt("quite", "something", "else"), 7) == "a"
    assert owner(prefix_index, prompt("quite"), 8) is None


def test_a_first_prompt_is_no_turn_of_another_prompt_of_its_session() -> None:
    def asked(system: str, *more: dict[str, str]) -> Prompt:
        messages = [{"role": "system", "content": system * 20}, {"role": "user", "content": "hi"}]
        read = read_prompt(EndpointKind.CHAT, "chat", {"messages": [*messages, *more]})
        assert read
        return read

    prefix_index = belief("a", "b")
    assign(prefix_index, upstream("a"), asked("Write a title. "), 7)
    assign(prefix_index, upstream("b"), asked("Answer briefly. "), None)
    assert owner(prefix_index, asked("Answer at length. "), 7) is None
    answer = {"role": "assistant", "content": "Hello."}
    assert owner(prefix_index, asked("Answer at length. ", answer), 7) == "a"


def test_a_conversation_has_one_home_for_all_its_turns() -> None:
    prefix_index = belief("a", "b")
    turns: list[str] = []
    for number in range(20):
        turns += [f"question {number}"]
        last = prompt(*turns)
        assign(prefix_index, upstream("a"), last, None)
        prefix_index.record("a", last, 0, None, {"content": f"answer {number}"})
        turns += [f"answer {number}"]
    assign(prefix_index, upstream("b"), prompt("another"), None)
    assert prefix_index.conversations_per_instance("chat") == {"a": 1, "b": 1}


def test_who_leaves_home_has_a_new_one() -> None:
    prefix_index = belief("a", "b")
    assign(prefix_index, upstream("a"), prompt("one"), None)
    assign(prefix_index, upstream("b"), prompt("one", "x", "two"), None)
    assert prefix_index.conversations_per_instance("chat") == {"b": 1}
    assert owner(prefix_index, prompt("one", "x", "two", "y", "three"), None) == "b"


def test_a_new_process_holds_nothing_and_is_home_to_nobody() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    assign(prefix_index, upstream("a"), first, 7)
    prefix_index.register(upstream("a"))
    assert owner(prefix_index, first, None) == "a"
    prefix_index.register(upstream("a", key="of the next run"))
    assert cached_tokens(prefix_index, "a", first) == 0
    assert owner(prefix_index, first, 7) is None
    assert prefix_index.conversations_per_instance("chat") == {}


def answered(
    prefix_index: PrefixIndex, name: str, *texts: str, task: int = 5
) -> ConversationFingerprint:
    """Have a conversation's turn answered in the one slot of an instance; return its chain."""
    asked, holder = prompt(*texts), object()
    conversation = assign(prefix_index, upstream(name), asked, None)
    slot_map = prefix_index.slot_maps[name]
    slot = slot_map.reserve(holder, conversation, 0.0)
    assert slot
    slot_map.mark_sent(slot, is_named=True)
    slot_map.release(holder, 0.0)
    slot_map.set_conversation(slot, conversation, 300, asked.blocks)
    prefix_index.record("a", asked, 0, None, {"content": "verse"})
    return prefix_index.fingerprints(name, [SlotState(0, task, 299, is_busy=False)])[0]


def test_what_a_slot_holds_is_told_and_known_again_by_the_next_run() -> None:
    chain = answered(belief("a"), "a", SYSTEM, "verse", "one")
    later = belief("b")
    later.register(upstream("a", key="of the next run"), [RestoredSlot(0, 1, 300, chain)])
    turn = prompt(SYSTEM, "verse", "one", "verse", "two")
    assert owner(later, turn, None) == "a"
    assert later.conversations_per_instance("chat") == {"a": 1}
    assert cached_tokens(later, "a", turn) > 0.8 * turn.tokens
    conversation = assign(later, upstream("a"), turn, None)
    slot = later.slot_maps["a"].reserve("turn", conversation, 0.0)
    assert slot
    assert (slot.conversation, slot.content.tokens) == (conversation, 300)


def test_a_conversation_belongs_to_the_process_that_begins_with_it() -> None:
    prefix_index = belief("a")
    chain = answered(prefix_index, "a", SYSTEM)
    prefix_index.register(upstream("a~2"), [RestoredSlot(0, 1, 300, chain)])
    turn = prompt(SYSTEM, "verse", "one")
    assert owner(prefix_index, turn, None) == prefix_index.owner(chain) == "a~2"
    assert prefix_index.conversations_per_instance("chat") == {"a~2": 1}


def test_a_conversation_that_went_on_elsewhere_stays_there() -> None:
    prefix_index = belief("a", "b")
    chain = answered(prefix_index, "a", SYSTEM)
    turn = prompt(SYSTEM, "verse", "one")
    conversation = assign(prefix_index, upstream("b"), turn, None)
    page = [SlotState(0, 5, 299, is_busy=False)]
    waiting = prefix_index.fingerprints("a", page)[0]
    assert waiting.turn_hashes[: len(chain.turn_hashes)] == chain.turn_hashes
    slot = prefix_index.slot_maps["b"].reserve("turn", conversation, 0.0)
    assert slot
    slot.fill(conversation, 400, turn.blocks)
    assert prefix_index.fingerprints("a", page) == {0: ConversationFingerprint((), chain.blocks)}
    prefix_index.register(upstream("a", key="of the next run"), [RestoredSlot(0, 1, 300, chain)])
    assert owner(prefix_index, turn, None) == "b"
    assert prefix_index.conversations_per_instance("chat") == {"b": 1}
    assert cached_tokens(prefix_index, "a", turn) > 0


def test_an_instance_that_registers_again_keeps_its_conversations() -> None:
    prefix_index = belief("a")
    chain = answered(prefix_index, "a", SYSTEM)
    prefix_index.register(
        upstream("a"), [RestoredSlot(0, 1, 700, ConversationFingerprint((7,), (8,)))]
    )
    assert prefix_index.fingerprints("a", [SlotState(0, 5, 299, is_busy=False)]) == {0: chain}


def test_of_an_instance_never_met_nothing_is_known() -> None:
    assert belief("a").fingerprints("b", [SlotState(0, 1, 300, is_busy=False)]) == {}


def test_of_an_instance_that_falls_short_less_is_expected() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    computed(prefix_index, "a", first)
    all_of_it = cached_tokens(prefix_index, "a", first)
    for _ in range(8):
        computed(prefix_index, "a", first, cached_tokens(prefix_index, "a", first), 0)
    assert cached_tokens(prefix_index, "a", first) < all_of_it / 10
    for _ in range(8):
        computed(prefix_index, "a", first, cached_tokens(prefix_index, "a", first), all_of_it)
    assert cached_tokens(prefix_index, "a", first) > all_of_it * 0.9


def test_who_was_expected_to_have_nothing_or_is_gone_is_trusted_no_less() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    computed(prefix_index, "a", first)
    before = cached_tokens(prefix_index, "a", first)
    computed(prefix_index, "a", first, 0, 32)
    prefix_index.record("gone", first, 5, Timings(0, 10, 1.0, 1, 1.0), None)
    assert cached_tokens(prefix_index, "a", first) == before


def test_only_the_latest_conversations_count_as_homes() -> None:
    prefix_index = belief("a", prefix_index_max_blocks=100_000)
    for number in range(200):
        assign(prefix_index, upstream("a"), prompt(f"{number}"), None)
    assert prefix_index.conversations_per_instance("chat") == {"a": 128}
    assert owner(prefix_index, prompt("0"), None) == "a"


def test_of_many_instances_more_conversations_count() -> None:
    names = [f"{number}" for number in range(30)]
    prefix_index = belief(*names, prefix_index_max_blocks=100_000)
    for number in range(300):
        assign(prefix_index, upstream(names[number % 30]), prompt(f"{number}"), None)
    assert set(prefix_index.conversations_per_instance("chat").values()) == {8}


def test_of_a_prompt_the_end_is_forgotten_first() -> None:
    prefix_index = belief("a", prefix_index_max_blocks=20)
    computed(prefix_index, "a", prompt(SYSTEM + "x" * 2000))
    assert cached_tokens(prefix_index, "a", prompt(SYSTEM)) > 0


prompts = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(
    lambda letters: prompt("".join(letter * 70 for letter in letters))
)


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts), max_size=30), st.integers(1, 40))
def test_it_stays_within_its_bounds_and_never_believes_too_much(
    schedule: list[tuple[str, Prompt]], prefix_index_max_blocks: int
) -> None:
    prefix_index = belief("a", "b", prefix_index_max_blocks=prefix_index_max_blocks)
    given_to: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, request in schedule:
        assign(prefix_index, upstream(name), request, None)
        given_to[name] |= set(request.blocks)
        assert len(prefix_index) <= prefix_index_max_blocks + max(1, prefix_index_max_blocks // 8)
        for who, blocks in given_to.items():
            known = [block in blocks for block in request.blocks]
            most = known.index(False) if False in known else len(known)
            assert cached_tokens(prefix_index, who, request) <= most * 16


def test_a_forgotten_conversation_begins_anew_and_its_idle_slot_is_told() -> None:
    prefix_index = belief("a")
    asked = prompt("one")
    conversation = assign(prefix_index, upstream("a"), asked, 7)
    slot_map = prefix_index.slot_maps["a"]
    slot = slot_map.reserve("lease", conversation, 0.0)
    assert slot
    slot_map.release("lease", 1.0)
    slot_map.set_conversation(slot, conversation, 300)
    turns = tuple(conversation.turn_hashes)
    hashes, slots, numbers = prefix_index.forget_conversations(turns[:1])
    assert slots == (("a", 0),)
    assert hashes == set(turns)
    assert numbers == {conversation.number}
    assert slot_map.conversations == 0
    assert assign(prefix_index, upstream("a"), asked, 7) is not conversation
