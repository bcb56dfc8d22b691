"""What is believed of caches: noted, corrected, forgotten, bounded."""

from __future__ import annotations

from fakes.requests import ask, upstream
from hypothesis import given
from hypothesis import strategies as st

from proxy.prompt_cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.prompt import Prompt
from proxy.upstream.slots import SlotState

SYSTEM = "You write verse, and nothing but verse. " * 20


def prompt(*texts: str) -> Prompt:
    read = ask(*texts).prompt
    assert read
    return read


def belief(*names: str, prefix_index_max_blocks: int = 1000) -> PrefixIndex:
    prefix_index = PrefixIndex(prefix_index_max_blocks)
    for name in names:
        prefix_index.register(upstream(name))
    return prefix_index


def test_who_was_given_a_prompt_holds_what_others_share_with_it() -> None:
    prefix_index = belief("a", "b")
    prefix_index.assign(upstream("a"), prompt(SYSTEM + "one"), None)
    other = prompt(SYSTEM + "two")
    assert 0.8 * other.tokens < prefix_index.cached_tokens("a", other) <= other.tokens
    assert prefix_index.cached_tokens("b", other) == 0
    assert prefix_index.cached_tokens("a", None) == prefix_index.cached_tokens("c", other) == 0


def test_a_conversation_is_known_by_its_history_with_our_answer() -> None:
    prefix_index = belief("a")
    first = prompt("one")
    prefix_index.assign(upstream("a"), first, None)
    prefix_index.record_reply(first, first.hash_with_reply({"content": "verse"}))
    assert prefix_index.owner(prompt("one", "verse", "two"), None) == "a"
    assert prefix_index.owner(prompt("one", "prose", "two"), None) == "a"  # by its last question
    assert prefix_index.owner(prompt("other", "verse", "two"), None) is None


def test_a_conversation_is_known_by_its_name_too() -> None:
    prefix_index = belief("a")
    prefix_index.assign(upstream("a"), prompt("one"), 7)
    assert prefix_index.owner(prompt("quite", "something", "else"), 7) == "a"
    assert prefix_index.owner(None, 7) == "a"
    assert prefix_index.owner(prompt("quite"), 8) is None


def test_a_conversation_has_one_home_for_all_its_turns() -> None:
    prefix_index = belief("a", "b")
    turns: list[str] = []
    for number in range(20):
        turns += [f"question {number}"]
        last = prompt(*turns)
        prefix_index.assign(upstream("a"), last, None)
        prefix_index.record_reply(last, last.hash_with_reply({"content": f"answer {number}"}))
        turns += [f"answer {number}"]
    prefix_index.assign(upstream("b"), prompt("another"), None)
    assert prefix_index.conversations_per_instance("chat") == {"a": 1, "b": 1}


def test_who_leaves_home_has_a_new_one() -> None:
    prefix_index = belief("a", "b")
    prefix_index.assign(upstream("a"), prompt("one"), None)
    prefix_index.assign(upstream("b"), prompt("one", "x", "two"), None)
    assert prefix_index.conversations_per_instance("chat") == {"b": 1}
    assert prefix_index.owner(prompt("one", "x", "two", "y", "three"), None) == "b"


def test_a_new_process_holds_nothing_and_is_home_to_nobody() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    prefix_index.assign(upstream("a"), first, 7)
    prefix_index.register(upstream("a"))
    assert prefix_index.owner(first, None) == "a"
    prefix_index.register(upstream("a", key="of the next run"))
    assert prefix_index.cached_tokens("a", first) == 0
    assert prefix_index.owner(first, 7) is None
    assert prefix_index.conversations_per_instance("chat") == {}


def test_what_was_restored_is_held() -> None:
    prefix_index = belief("a")
    prefix_index.add_prefix("a", prompt(SYSTEM).blocks)
    prefix_index.add_prefix("unknown", prompt(SYSTEM).blocks)
    assert prefix_index.cached_tokens("a", prompt(SYSTEM)) > 0


def answered(
    prefix_index: PrefixIndex, name: str, *texts: str, task: int = 5
) -> ConversationFingerprint:
    """Have a conversation's turn answered in the one slot of an instance; return its chain."""
    asked, holder = prompt(*texts), object()
    conversation = prefix_index.assign(upstream(name), asked, None)
    slot_map = prefix_index.slot_map(name)
    slot = slot_map.reserve(holder, conversation, 0.0)
    assert slot
    slot_map.mark_sent(slot)
    slot_map.release(holder, 0.0)
    slot_map.set_conversation(slot, conversation, 300, asked.blocks)
    prefix_index.record_reply(asked, asked.hash_with_reply({"content": "verse"}))
    return prefix_index.fingerprints(name, [SlotState(0, task, 299, is_busy=False)], 0.0)[0]


def test_what_a_slot_holds_is_told_and_known_again_by_the_next_run() -> None:
    chain = answered(belief("a"), "a", SYSTEM, "verse", "one")
    later = belief("b")
    later.register(upstream("a", key="of the next run"), [RestoredSlot(0, 1, 300, chain)])
    turn = prompt(SYSTEM, "verse", "one", "verse", "two")
    assert later.owner(turn, None) == "a"
    assert later.conversations_per_instance("chat") == {"a": 1}
    assert later.cached_tokens("a", turn) > 0.8 * turn.tokens
    conversation = later.assign(upstream("a"), turn, None)
    slot = later.slot_map("a").reserve("turn", conversation, 0.0)
    assert slot
    assert (slot.conversation, slot.tokens) == (conversation, 300)


def test_a_conversation_that_went_on_elsewhere_stays_there() -> None:
    prefix_index = belief("a", "b")
    chain = answered(prefix_index, "a", SYSTEM)
    turn = prompt(SYSTEM, "verse", "one")
    prefix_index.assign(upstream("b"), turn, None)
    page = [SlotState(0, 5, 299, is_busy=False)]
    assert prefix_index.fingerprints("a", page, 0.0) == {
        0: ConversationFingerprint((), chain.blocks)
    }
    prefix_index.register(upstream("a", key="of the next run"), [RestoredSlot(0, 1, 300, chain)])
    assert prefix_index.owner(turn, None) == "b"
    assert prefix_index.conversations_per_instance("chat") == {"b": 1}
    assert prefix_index.cached_tokens("a", turn) > 0


def test_an_instance_that_comes_back_as_it_was_is_not_what_it_began_with() -> None:
    prefix_index = belief("a")
    chain = answered(prefix_index, "a", SYSTEM)
    prefix_index.register(
        upstream("a"), [RestoredSlot(0, 1, 700, ConversationFingerprint((7,), (8,)))]
    )
    assert prefix_index.fingerprints("a", [SlotState(0, 5, 299, is_busy=False)], 0.0) == {0: chain}


def test_of_an_instance_never_met_nothing_is_known() -> None:
    assert belief("a").fingerprints("b", [SlotState(0, 1, 300, is_busy=False)], 0.0) == {}


def test_of_an_instance_that_falls_short_less_is_expected() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    prefix_index.add_prefix("a", first.blocks)
    all_of_it = prefix_index.cached_tokens("a", first)
    for _ in range(8):
        prefix_index.record_hit("a", prefix_index.cached_tokens("a", first), 0)
    assert prefix_index.cached_tokens("a", first) < all_of_it / 10
    for _ in range(8):
        prefix_index.record_hit("a", prefix_index.cached_tokens("a", first), all_of_it)
    assert prefix_index.cached_tokens("a", first) > all_of_it * 0.9


def test_who_was_expected_to_have_nothing_or_is_gone_is_trusted_no_less() -> None:
    prefix_index = belief("a")
    first = prompt(SYSTEM)
    prefix_index.add_prefix("a", first.blocks)
    before = prefix_index.cached_tokens("a", first)
    prefix_index.record_hit("a", 0, 32)
    prefix_index.record_hit("gone", 5, 0)
    assert prefix_index.cached_tokens("a", first) == before
    assert prefix_index.cached_tokens("gone", first) == 0


def test_only_the_latest_conversations_count_as_homes() -> None:
    prefix_index = belief("a", prefix_index_max_blocks=100_000)
    for number in range(200):
        prefix_index.assign(upstream("a"), prompt(f"{number}"), None)
    assert prefix_index.conversations_per_instance("chat") == {"a": 128}
    assert prefix_index.owner(prompt("0"), None) == "a"


def test_of_a_prompt_the_end_is_forgotten_first() -> None:
    prefix_index = belief("a", prefix_index_max_blocks=20)
    prefix_index.add_prefix("a", prompt(SYSTEM + "x" * 2000).blocks)
    assert prefix_index.cached_tokens("a", prompt(SYSTEM)) > 0


prompts = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(
    lambda letters: prompt("".join(upstream_request * 70 for upstream_request in letters))
)


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts), max_size=30), st.integers(1, 40))
def test_it_stays_within_its_bounds_and_never_believes_too_much(
    schedule: list[tuple[str, Prompt]], prefix_index_max_blocks: int
) -> None:
    prefix_index = belief("a", "b", prefix_index_max_blocks=prefix_index_max_blocks)
    given_to: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, one in schedule:
        prefix_index.assign(upstream(name), one, None)
        given_to[name] |= set(one.blocks)
        assert len(prefix_index) <= prefix_index_max_blocks + max(1, prefix_index_max_blocks // 8)
        for who, blocks in given_to.items():
            known = [block in blocks for block in one.blocks]
            most = known.index(False) if False in known else len(known)
            assert prefix_index.cached_tokens(who, one) <= most * 16
