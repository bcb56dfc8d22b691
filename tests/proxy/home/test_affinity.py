"""What is believed of caches: noted, corrected, forgotten, bounded."""

from __future__ import annotations

from fakes.asks import ask, upstream
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.slots import Seen
from proxy.home.affinity import Affinity
from proxy.home.chain import Chain, Filled
from proxy.home.prefix import Prompt

SYSTEM = "You write verse, and nothing but verse. " * 20


def prompt(*texts: str) -> Prompt:
    read = ask(*texts).prompt
    assert read
    return read


def belief(*names: str, index_max: int = 1000) -> Affinity:
    affinity = Affinity(index_max)
    for name in names:
        affinity.meet(upstream(name))
    return affinity


def test_who_was_given_a_prompt_holds_what_others_share_with_it() -> None:
    affinity = belief("a", "b")
    affinity.settle(upstream("a"), prompt(SYSTEM + "one"), None)
    other = prompt(SYSTEM + "two")
    assert 0.8 * other.tokens < affinity.cached_tokens("a", other) <= other.tokens
    assert affinity.cached_tokens("b", other) == 0
    assert affinity.cached_tokens("a", None) == affinity.cached_tokens("c", other) == 0


def test_a_conversation_is_known_by_its_history_with_our_answer() -> None:
    affinity = belief("a")
    first = prompt("one")
    affinity.settle(upstream("a"), first, None)
    affinity.answered(first, first.answered({"content": "verse"}))
    assert affinity.home(prompt("one", "verse", "two"), None) == "a"
    assert affinity.home(prompt("one", "prose", "two"), None) == "a"  # by its last question
    assert affinity.home(prompt("other", "verse", "two"), None) is None


def test_a_conversation_is_known_by_its_name_too() -> None:
    affinity = belief("a")
    affinity.settle(upstream("a"), prompt("one"), 7)
    assert affinity.home(prompt("quite", "something", "else"), 7) == "a"
    assert affinity.home(None, 7) == "a"
    assert affinity.home(prompt("quite"), 8) is None


def test_a_conversation_has_one_home_for_all_its_turns() -> None:
    affinity = belief("a", "b")
    turns: list[str] = []
    for number in range(20):
        turns += [f"question {number}"]
        last = prompt(*turns)
        affinity.settle(upstream("a"), last, None)
        affinity.answered(last, last.answered({"content": f"answer {number}"}))
        turns += [f"answer {number}"]
    affinity.settle(upstream("b"), prompt("another"), None)
    assert affinity.homes("chat") == {"a": 1, "b": 1}


def test_who_leaves_home_has_a_new_one() -> None:
    affinity = belief("a", "b")
    affinity.settle(upstream("a"), prompt("one"), None)
    affinity.settle(upstream("b"), prompt("one", "x", "two"), None)
    assert affinity.homes("chat") == {"b": 1}
    assert affinity.home(prompt("one", "x", "two", "y", "three"), None) == "b"


def test_a_new_process_holds_nothing_and_is_home_to_nobody() -> None:
    affinity = belief("a")
    first = prompt(SYSTEM)
    affinity.settle(upstream("a"), first, 7)
    affinity.meet(upstream("a"))
    assert affinity.home(first, None) == "a"
    affinity.meet(upstream("a", key="of the next run"))
    assert affinity.cached_tokens("a", first) == 0
    assert affinity.home(first, 7) is None
    assert affinity.homes("chat") == {}


def test_what_was_restored_is_held() -> None:
    affinity = belief("a")
    affinity.holds("a", prompt(SYSTEM).blocks)
    affinity.holds("unknown", prompt(SYSTEM).blocks)
    assert affinity.cached_tokens("a", prompt(SYSTEM)) > 0


def answered(affinity: Affinity, name: str, *texts: str, task: int = 5) -> Chain:
    """Have a conversation's turn answered in the one slot of an instance; return its chain."""
    asked, holder = prompt(*texts), object()
    talk = affinity.settle(upstream(name), asked, None)
    berths = affinity.berths(name)
    berth = berths.board(holder, talk, 0.0)
    assert berth
    berths.depart(berth)
    berths.leave(holder, 0.0)
    berths.know(berth, talk, 300, asked.blocks)
    affinity.answered(asked, asked.answered({"content": "verse"}))
    return affinity.chains(name, [Seen(0, task, 299, is_busy=False)], 0.0)[0]


def test_what_a_slot_holds_is_told_and_known_again_by_the_next_run() -> None:
    chain = answered(belief("a"), "a", SYSTEM, "verse", "one")
    later = belief("b")
    later.meet(upstream("a", key="of the next run"), [Filled(0, 1, 300, chain)])
    turn = prompt(SYSTEM, "verse", "one", "verse", "two")
    assert later.home(turn, None) == "a"
    assert later.homes("chat") == {"a": 1}
    assert later.cached_tokens("a", turn) > 0.8 * turn.tokens
    talk = later.settle(upstream("a"), turn, None)
    berth = later.berths("a").board("turn", talk, 0.0)
    assert berth
    assert (berth.talk, berth.tokens) == (talk, 300)


def test_a_conversation_that_went_on_elsewhere_stays_there() -> None:
    affinity = belief("a", "b")
    chain = answered(affinity, "a", SYSTEM)
    turn = prompt(SYSTEM, "verse", "one")
    affinity.settle(upstream("b"), turn, None)
    page = [Seen(0, 5, 299, is_busy=False)]
    assert affinity.chains("a", page, 0.0) == {0: Chain((), chain.blocks)}
    affinity.meet(upstream("a", key="of the next run"), [Filled(0, 1, 300, chain)])
    assert affinity.home(turn, None) == "b"
    assert affinity.homes("chat") == {"b": 1}
    assert affinity.cached_tokens("a", turn) > 0


def test_an_instance_that_comes_back_as_it_was_is_not_what_it_began_with() -> None:
    affinity = belief("a")
    chain = answered(affinity, "a", SYSTEM)
    affinity.meet(upstream("a"), [Filled(0, 1, 700, Chain((7,), (8,)))])
    assert affinity.chains("a", [Seen(0, 5, 299, is_busy=False)], 0.0) == {0: chain}


def test_of_an_instance_never_met_nothing_is_known() -> None:
    assert belief("a").chains("b", [Seen(0, 1, 300, is_busy=False)], 0.0) == {}


def test_of_an_instance_that_falls_short_less_is_expected() -> None:
    affinity = belief("a")
    first = prompt(SYSTEM)
    affinity.holds("a", first.blocks)
    all_of_it = affinity.cached_tokens("a", first)
    for _ in range(8):
        affinity.correct("a", affinity.cached_tokens("a", first), 0)
    assert affinity.cached_tokens("a", first) < all_of_it / 10
    for _ in range(8):
        affinity.correct("a", affinity.cached_tokens("a", first), all_of_it)
    assert affinity.cached_tokens("a", first) > all_of_it * 0.9


def test_who_was_expected_to_have_nothing_or_is_gone_is_trusted_no_less() -> None:
    affinity = belief("a")
    first = prompt(SYSTEM)
    affinity.holds("a", first.blocks)
    before = affinity.cached_tokens("a", first)
    affinity.correct("a", 0, 32)
    affinity.correct("gone", 5, 0)
    assert affinity.cached_tokens("a", first) == before
    assert affinity.cached_tokens("gone", first) == 0


def test_only_the_latest_conversations_count_as_homes() -> None:
    affinity = belief("a", index_max=100_000)
    for number in range(200):
        affinity.settle(upstream("a"), prompt(f"{number}"), None)
    assert affinity.homes("chat") == {"a": 128}
    assert affinity.home(prompt("0"), None) == "a"


def test_of_a_prompt_the_end_is_forgotten_first() -> None:
    affinity = belief("a", index_max=20)
    affinity.holds("a", prompt(SYSTEM + "x" * 2000).blocks)
    assert affinity.cached_tokens("a", prompt(SYSTEM)) > 0


prompts = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(
    lambda letters: prompt("".join(letter * 70 for letter in letters))
)


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts), max_size=30), st.integers(1, 40))
def test_it_stays_within_its_bounds_and_never_believes_too_much(
    schedule: list[tuple[str, Prompt]], index_max: int
) -> None:
    affinity = belief("a", "b", index_max=index_max)
    given_to: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, one in schedule:
        affinity.settle(upstream(name), one, None)
        given_to[name] |= set(one.blocks)
        assert len(affinity) <= index_max + max(1, index_max // 8)
        for who, blocks in given_to.items():
            known = [block in blocks for block in one.blocks]
            most = known.index(False) if False in known else len(known)
            assert affinity.cached_tokens(who, one) <= most * 16
