"""Which instance takes a request: each rule, and the laws of all rules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import ask, upstream

from proxy.cache.index import CacheHint
from proxy.router.candidates import Candidates
from proxy.router.lease import Lease, LeaseTimes, RoutingTarget, Weight
from proxy.router.registry import InstanceSets
from proxy.settings import Policy
from proxy.upstream.upstream import Node, Rates

FULL: dict[str, Any] = {"slots": 2, "slots_in_use": 2}
FREE: dict[str, Any] = {"slots": 2, "slots_in_use": 0}
_TIMEOUT_S = 60.0


# The instance whose slot the request takes, or None; when it leaves its owner, or None.
Choice = tuple[str | None, float | None]


@dataclass(frozen=True)
class Candidate:
    """An instance as one request sees it; see `RoutingTarget` and `CacheHint`."""

    name: str
    slots: int
    slots_in_use: int = 0
    turn: float = 0.0
    conversations: int = 0
    cached_tokens: int = 0
    saved_tokens: int = 0
    backlog_tokens: int = 0
    prefill_tps: float = 500.0
    is_spare: bool = False
    is_on_trial: bool = False
    weight: float = 1.0

    @property
    def is_free(self) -> bool:
        return self.slots_in_use < self.slots


class Instance(RoutingTarget):
    """Has a backlog that its requests do not explain."""

    backlog = 0

    @property
    def backlog_tokens(self) -> int:
        return self.backlog


def instance(number: int, facts: Candidate, trial_share: float) -> Instance:
    made = Instance(
        replace(
            upstream(facts.name, facts.slots),
            node=Node("n", "chat") if facts.is_spare else None,
            trial_share=trial_share if facts.is_on_trial else 0.0,
        ),
        Rates(prefill_tps=facts.prefill_tps),
        turn=facts.turn,
        bit=1 << number,
    )
    made.backlog = facts.backlog_tokens
    made.hold([Lease(ask("x"), made, float) for _ in range(facts.slots_in_use)])
    return made


def choose(
    policy: Policy,
    everyone: Sequence[Candidate],
    tokens: int,
    home: str | None,
    waited_s: float,
    *,
    on_trial: bool = False,
    decode_s: float = 0.0,
    held_s: float = 0.0,
    waiting: Mapping[str, int] = MappingProxyType({}),
) -> Choice:
    """Choose for a request; `decode_s` and `held_s` are averages of finished ones."""
    share = 0.999999 if on_trial else 1e-9
    instances = [instance(number, facts, share) for number, facts in enumerate(everyone)]
    weights = {facts.name: Weight(facts.weight) for facts in everyone}
    times = LeaseTimes()
    times.decode_s, times.held_s = decode_s, held_s
    owners: dict[int, int] = {}
    for made, facts in zip(instances, everyone, strict=True):
        if facts.conversations:
            owners[facts.conversations] = owners.get(facts.conversations, 0) | made.bit
    cached, saved = (
        sorted(
            ((getattr(facts, name), 1 << number) for number, facts in enumerate(everyone)),
            reverse=True,
        )
        for name in ("cached_tokens", "saved_tokens")
    )
    request = ask("x" * 4 * tokens or "x", queue_timeout_s=_TIMEOUT_S)
    assert request.prompt
    request = replace(request, prompt=replace(request.prompt, tokens=tokens))
    hint = CacheHint(home, cached, saved=saved)
    has_trial = any(facts.is_on_trial for facts in everyone)
    sets = InstanceSets(instances, weights)
    candidates = Candidates(sets, owners, policy, times, share if has_trial else 0.0, waiting)
    found, moves_in_s = candidates.choice(request, (), hint, waited_s)
    return found.upstream.name if found else None, moves_in_s


def chosen(
    *candidates: Candidate,
    policy: Policy = "affinity",
    tokens: int = 1000,
    home: str | None = None,
    waited_s: float = 0.0,
    decode_s: float = 0.0,
    held_s: float = 0.0,
    waiting: Mapping[str, int] = MappingProxyType({}),
) -> Choice:
    return choose(
        policy,
        candidates,
        tokens,
        home,
        waited_s,
        decode_s=decode_s,
        held_s=held_s,
        waiting=waiting,
    )


def test_a_conversation_goes_home_however_busy_home_is() -> None:
    home = Candidate(
        "home", slots=4, slots_in_use=3, conversations=9, cached_tokens=900, backlog_tokens=5000
    )
    assert chosen(home, Candidate("idle", **FREE), home="home") == ("home", None)


def test_a_slot_that_others_wait_for_is_free_only_after_their_turns() -> None:
    home = Candidate("home", **FULL, cached_tokens=900)
    other = Candidate("other", **FREE)
    choice = functools.partial(chosen, held_s=40.0, home="home")
    assert choice(home, other) == ("other", None)
    waits = functools.partial(choice, waiting={"other": 1})
    assert waits(home, other, waited_s=10.0) == (None, _TIMEOUT_S / 2 - 10)
    assert waits(home, other, waited_s=_TIMEOUT_S / 2) == ("other", None)
    # Its only slot comes free in 40 s, the two of the other one in 20 s on average.
    assert waits(replace(home, slots=1, slots_in_use=1), other) == ("other", None)


def test_home_is_waited_for_as_long_as_the_move_would_cost() -> None:
    home = Candidate("home", **FULL, cached_tokens=900, prefill_tps=100.0)
    other = Candidate("other", **FREE, prefill_tps=100.0)
    # 1.25 times 10 s there, and 9 s to fill its cache again, less the 1 s that home would take.
    assert chosen(home, other, home="home") == (None, 20.5)
    assert chosen(home, other, home="home", waited_s=20.0) == (None, 0.5)
    assert chosen(home, other, home="home", waited_s=20.5) == ("other", None)


def test_home_is_left_at_once_where_the_wait_is_known_to_cost_more() -> None:
    home = Candidate("home", **FULL, cached_tokens=100, prefill_tps=1000.0)
    slow = Candidate("slow", **FREE, prefill_tps=10.0)
    assert chosen(home, slow, Candidate("quick", **FREE), home="home", held_s=60.0) == (
        "quick",
        None,
    )


def test_home_is_not_waited_for_where_a_file_has_its_cache() -> None:
    home = Candidate("home", **FULL, cached_tokens=900, saved_tokens=890, prefill_tps=100.0)
    other = Candidate("other", **FREE, cached_tokens=890, saved_tokens=890, prefill_tps=100.0)
    assert chosen(home, other, home="home", held_s=2.0) == ("other", None)


def test_without_a_free_slot_there_is_no_choice() -> None:
    home, other = Candidate("home", **FULL), Candidate("other", **FULL)
    assert chosen(home, other, home="home") == chosen(home, other) == (None, None)


def test_a_new_conversation_goes_where_most_of_it_is_held() -> None:
    holder = Candidate("holder", slots=4, slots_in_use=3, conversations=1, cached_tokens=600)
    assert chosen(Candidate("idle", slots=4, conversations=1), holder) == ("holder", None)


def test_but_not_where_more_than_its_share_of_conversations_lives() -> None:
    holder = Candidate("holder", slots=4, conversations=6, cached_tokens=600)
    assert chosen(holder, Candidate("idle", slots=4, conversations=2)) == ("idle", None)
    full = Candidate("full", slots=4, slots_in_use=4, conversations=2)
    assert chosen(holder, full) == ("holder", None)


def test_a_few_tokens_are_no_reason_to_join_others() -> None:
    holder = Candidate("holder", slots=4, conversations=1, cached_tokens=63)
    assert chosen(holder, Candidate("idle", slots=4)) == ("idle", None)


def test_the_first_few_conversations_may_live_together() -> None:
    holder = Candidate("holder", slots=4, conversations=2, cached_tokens=600)
    assert chosen(holder, Candidate("idle", slots=4)) == ("holder", None)
    assert chosen(replace(holder, conversations=3), Candidate("idle", slots=4)) == ("idle", None)


def test_among_equals_the_fewest_homes_then_the_least_busy_then_who_rested_longest() -> None:
    a, b = (
        Candidate("a", slots=4, conversations=2),
        Candidate("b", slots=4, conversations=1, slots_in_use=2),
    )
    assert chosen(a, b) == ("b", None)
    assert chosen(replace(a, conversations=1), b) == ("a", None)
    assert chosen(replace(a, conversations=1, slots_in_use=2, turn=7), b) == ("b", None)


def test_least_busy_counts_requests_for_each_slot() -> None:
    small = Candidate("small", slots=1, slots_in_use=0, turn=9, cached_tokens=0)
    large = Candidate("large", slots=8, slots_in_use=1, cached_tokens=900)
    assert chosen(small, large, policy="least-busy", home="large") == ("small", None)


def test_round_robin_takes_who_was_asked_longest_ago_and_has_room() -> None:
    a, b = (
        Candidate("a", slots=2, turn=1, slots_in_use=2),
        Candidate("b", slots=2, turn=5),
    )
    assert chosen(a, b, Candidate("c", slots=2, turn=6), policy="round-robin") == ("b", None)


candidates = st.lists(
    st.builds(
        Candidate,
        name=st.sampled_from("abcdef"),
        slots=st.integers(1, 4),
        slots_in_use=st.integers(0, 4),
        turn=st.integers(0, 9),
        conversations=st.integers(0, 9),
        cached_tokens=st.integers(0, 2000),
        backlog_tokens=st.integers(0, 5000),
        prefill_tps=st.floats(1, 5000),
        weight=st.floats(0.05, 4),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda build: build.name,
)
policies = st.sampled_from(["affinity", "least-busy", "round-robin"])


@given(policies, candidates, st.integers(0, 2000), st.none() | st.sampled_from("abcdef"))
def test_only_a_free_slot_is_given_and_only_home_is_waited_for(
    policy: Policy, everyone: list[Candidate], tokens: int, home: str | None
) -> None:
    choice = choose(policy, everyone, tokens, home, 0.0)
    free = {client.name for client in everyone if client.slots_in_use < client.slots}
    assert choice[0] is None or choice[0] in free
    if choice[0] is None and free:
        assert policy == "affinity"
        assert home in {client.name for client in everyone} - free
        assert choice[1] is not None
        assert choice[1] > 0


@given(candidates, st.integers(0, 2000), st.sampled_from("abcdef"))
def test_nobody_waits_for_home_for_ever(everyone: list[Candidate], tokens: int, home: str) -> None:
    first = choose("affinity", everyone, tokens, home, 0.0)
    if first[1] is not None:
        assert choose("affinity", everyone, tokens, home, first[1])[0] is not None


# Other machines.


@pytest.mark.parametrize("policy", ["affinity", "least-busy", "round-robin"])
def test_a_spare_instance_takes_requests_that_find_no_other_slot(policy: Policy) -> None:
    spare = Candidate("spare", **FREE, turn=0, cached_tokens=900, is_spare=True)
    ours = Candidate("ours", slots=4, slots_in_use=3, turn=7, conversations=9)
    assert chosen(spare, ours, policy=policy) == ("ours", None)
    assert chosen(spare, replace(ours, slots_in_use=4), policy=policy) == ("spare", None)


def test_a_conversation_stays_with_the_spare_it_began_at() -> None:
    spare = Candidate("spare", **FREE, cached_tokens=900, is_spare=True)
    assert chosen(spare, Candidate("ours", **FREE), home="spare") == ("spare", None)


def test_the_share_of_ours_is_counted_among_ours() -> None:
    many = Candidate("many", **FREE, conversations=3, cached_tokens=900)
    few = Candidate("few", **FREE, conversations=2)
    spares = [
        Candidate(f"s{number}", **FREE, conversations=40, is_spare=True) for number in range(3)
    ]
    assert chosen(many, few, *spares) == ("many", None)
    assert chosen(replace(many, conversations=6), few, *spares) == ("few", None)


# A trial.


@pytest.mark.parametrize("on_trial", [True, False])
@given(policy=policies, everyone=candidates, trials=st.sets(st.sampled_from("abcdef")))
def test_a_request_leaves_its_side_only_where_that_has_no_free_slot(
    *, policy: Policy, everyone: list[Candidate], trials: set[str], on_trial: bool
) -> None:
    sides = {client.name: client.name in trials for client in everyone}
    everyone = [replace(client, is_on_trial=sides[client.name]) for client in everyone]
    found = choose(policy, everyone, 1000, None, 0.0, on_trial=on_trial)[0]
    free = {client.name for client in everyone if client.is_free}
    own = {name for name in free if sides[name] == on_trial}
    assert found in (own or free) if free else found is None


def test_a_conversation_of_the_trial_waits_for_its_owner_as_any_does() -> None:
    owner = Candidate("owner", **FULL, cached_tokens=900, prefill_tps=100.0, is_on_trial=True)
    base = Candidate("base", **FREE, prefill_tps=100.0)
    found = choose("affinity", [owner, base], 1000, "owner", 0.0, on_trial=True)
    assert found == (None, 20.5)
    found = choose("affinity", [owner, base], 1000, "owner", 20.5, on_trial=True)
    assert found == ("base", None)


def test_the_share_of_conversations_is_counted_on_one_side() -> None:
    trial = Candidate("trial", **FREE, conversations=40, is_on_trial=True)
    holder = Candidate("holder", **FREE, conversations=6, cached_tokens=900)
    assert chosen(trial, holder, Candidate("idle", **FREE, conversations=2)) == ("idle", None)


# Unequal speed.


def slow(name: str = "slow", **facts: Any) -> Candidate:
    """Return an instance at a quarter of the speed of `fast`."""
    known = {"slots": 4, "prefill_tps": 100.0, "weight": 0.4}
    return Candidate(name, **(known | facts))


def fast(**facts: Any) -> Candidate:
    known = {"slots": 4, "prefill_tps": 400.0, "weight": 1.6}
    return Candidate("fast", **(known | facts))


@pytest.mark.parametrize(
    ("owned", "expected"),
    [((0, 0), "fast"), ((2, 0), "fast"), ((4, 0), "slow"), ((4, 1), "fast"), ((8, 1), "slow")],
)
def test_new_conversations_are_shared_by_speed(owned: tuple[int, int], expected: str) -> None:
    by_speed = fast(conversations=owned[0]), slow(conversations=owned[1])
    assert chosen(*by_speed, tokens=100)[0] == expected
    assert chosen(*reversed(by_speed), tokens=100)[0] == expected


def test_requests_are_counted_over_the_speed() -> None:
    busy = fast(slots_in_use=3), slow(slots_in_use=1)
    assert chosen(*busy, policy="least-busy") == ("fast", None)
    assert chosen(fast(slots_in_use=3), slow(), policy="least-busy") == ("slow", None)


def test_a_cached_conversation_stays_on_a_slow_instance_where_that_saves_more() -> None:
    home = slow(cached_tokens=4000)
    assert chosen(home, fast(), tokens=4100, home="slow", decode_s=8.0) == ("slow", None)


def test_a_cached_conversation_leaves_a_slow_instance_where_another_answers_sooner() -> None:
    # There: 1.25 times 2.5 s, 5 s to decode, and 6 s in which the cache was filled; here 24 s.
    home = slow(cached_tokens=600)
    assert chosen(home, fast(), tokens=1000, home="slow", decode_s=8.0) == ("fast", None)
    equal = replace(home, weight=1.6), fast()
    assert chosen(*equal, tokens=1000, home="slow", decode_s=8.0) == ("slow", None)


def test_a_conversation_that_moved_does_not_go_back() -> None:
    found = chosen(slow(cached_tokens=600), fast(cached_tokens=1000), tokens=1100, home="fast")
    assert found == ("fast", None)


def test_a_fast_instance_takes_no_more_than_its_share_of_those_that_leave() -> None:
    home = slow(cached_tokens=600, conversations=2, weight=0.8)
    # 1.25 times three fifths of all, and one more.
    below, above = (fast(conversations=count, weight=1.2) for count in (9, 10))
    assert chosen(home, below, tokens=1000, home="slow", decode_s=16.0) == ("fast", None)
    assert chosen(home, above, tokens=1000, home="slow", decode_s=16.0) == ("slow", None)


def test_a_shared_prefix_draws_to_a_slow_instance_only_where_that_saves_more() -> None:
    assert chosen(slow(cached_tokens=640), fast(), tokens=700, decode_s=8.0) == ("fast", None)
    assert chosen(slow(cached_tokens=3200), fast(), tokens=3300, decode_s=8.0) == ("fast", None)
    assert chosen(slow(cached_tokens=6400), fast(), tokens=6500, decode_s=0.8) == ("slow", None)


def test_a_fast_owner_is_waited_for_longer_than_a_slow_one() -> None:
    waits = [
        chosen(
            replace(case, slots_in_use=4, cached_tokens=900), other, home=case.name, decode_s=8.0
        )[1]
        for case, other in ((fast(), slow()), (slow(), fast()))
    ]
    assert waits[0] is not None
    assert waits[0] > 20
    assert waits[1] is None


@given(candidates, st.integers(0, 2000))
def test_a_free_owner_is_left_only_for_a_faster_one(everyone: list[Candidate], tokens: int) -> None:
    owner = replace(everyone[0], slots_in_use=0, cached_tokens=900)
    others = everyone[1:]
    found = chosen(owner, *others, tokens=tokens, home=owner.name)[0]
    weights = {other.name: other.weight for other in others}
    assert found == owner.name or weights[str(found)] > owner.weight
