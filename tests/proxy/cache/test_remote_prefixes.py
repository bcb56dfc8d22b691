"""Reports of other machines' caches: found, expiring, bounded, and weaker than our records."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from support.requests import upstream

from proxy.cache.holders import RemotePrefixes
from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import Prompt, read_prompt
from proxy.cache.remote_prefixes import EXPIRES_S
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

SYSTEM = "You write verse, and nothing but verse. " * 40


def chat(*texts: str) -> Prompt:
    """Return a chat with a system prompt, and these texts of the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    prompt = read_prompt(EndpointKind.CHAT, "chat", {"messages": messages})
    assert prompt
    return prompt


FIRST = chat("Of the sea?")
NEXT = chat("Of the sea?", "It is wide.", "And deep?")
OTHER = chat("Of the sky?")


def said(*prompts: Prompt) -> list[int]:
    return [turn_hash for prompt in prompts for turn_hash in prompt.turn_hashes]


def index(*names: str) -> PrefixIndex:
    prefix_index = PrefixIndex(1000, lambda: 0.0)
    for name in names:
        prefix_index.register(upstream(name))
    return prefix_index


def test_a_conversation_of_another_machine_has_its_owner_there() -> None:
    prefix_index = index("a", "b")
    prefix_index.remote.add("b", said(FIRST), 0.0)
    hint = prefix_index.look_up(NEXT, None)
    assert (hint.owner, hint.conversation) == ("b", None)
    assert hint.cached_tokens(prefix_index.bit("a")) == 0
    assert hint.cached_tokens(prefix_index.bit("b")) == pytest.approx(FIRST.tokens, abs=1)
    # It is ours from now on.
    prefix_index.assign(upstream("b"), NEXT, None, hint)
    prefix_index.remote.forget("b")
    assert prefix_index.look_up(NEXT, None).owner == "b"


def test_a_shared_prefix_attracts_and_owns_nothing() -> None:
    prefix_index = index("a", "b")
    prefix_index.remote.add("b", said(FIRST), 0.0)
    hint = prefix_index.look_up(OTHER, None)
    assert hint.owner is None
    assert hint.cached_tokens(prefix_index.bit("b")) == OTHER.tokens_until(0) > 300


def test_our_own_record_of_the_same_turn_goes_first_and_an_earlier_one_does_not() -> None:
    prefix_index = index("a", "b")
    prefix_index.assign(upstream("a"), FIRST, None, prefix_index.look_up(FIRST, None))
    prefix_index.remote.add("b", said(FIRST), 0.0)
    assert prefix_index.look_up(NEXT, None).owner == "a"
    prefix_index.remote.add("b", [NEXT.turn_hashes[2]], 0.0)
    hint = prefix_index.look_up(NEXT, None)
    assert hint.owner == "b"
    assert hint.conversation


def test_what_proves_wrong_is_believed_less() -> None:
    prefix_index = index("b")
    prefix_index.remote.add("b", said(FIRST), 0.0)
    before = prefix_index.look_up(NEXT, None).cached_tokens(prefix_index.bit("b"))
    prefix_index.record("b", OTHER, 100, Timings(0, 10, 1.0, 1, 1.0), None)
    assert prefix_index.look_up(NEXT, None).cached_tokens(prefix_index.bit("b")) < before


def test_an_instance_that_was_never_met_is_no_owner() -> None:
    prefix_index = index("a")
    prefix_index.remote.add("b", said(FIRST), 0.0)
    hint = prefix_index.look_up(NEXT, None)
    assert (hint.owner, hint.cached) == (None, [])


def test_a_belief_expires() -> None:
    remote = RemotePrefixes(100)
    remote.add("b", said(FIRST), 0.0)
    assert remote.find(NEXT, EXPIRES_S - 1)[1] == "b"
    assert remote.find(NEXT, EXPIRES_S + 1)[1] is None


def test_beliefs_are_bounded_and_the_oldest_goes_first() -> None:
    remote = RemotePrefixes(4)
    remote.add("b", range(1_000_000, 1_000_100), 0.0)
    remote.add("b", said(FIRST), 0.0)
    assert len(remote.holders) == 4
    assert remote.find(NEXT, 0.0)[1] == "b"


class Unscanned(OrderedDict[int, dict[str, float]]):
    """Gives its entries by their keys, and never all of them."""

    def items(self) -> Any:
        raise AssertionError("it looks at each entry")

    __iter__ = keys = values = items


def test_a_machine_is_forgotten_without_a_look_at_what_others_hold() -> None:
    remote = RemotePrefixes(40)
    remote.holders = Unscanned()
    for number in range(30):  # beyond both bounds
        remote.add(f"node-{number}", range(number, number + 40), 0.0)
    remote.add("b", said(FIRST), 0.0)
    for number in range(30):
        remote.forget(f"node-{number}")
    assert len(remote.holders) == len(said(FIRST))
    assert remote.find(NEXT, 0.0)[1] == "b"
    remote.forget("b")
    remote.forget("b")
    assert not remote.holders


def test_of_many_that_hold_a_prefix_the_latest_count() -> None:
    remote = RemotePrefixes(100)
    for number in range(1000):
        remote.add(f"node-{number}", said(FIRST), 0.0)
    tokens, owner, _ = remote.find(NEXT, 0.0)
    assert owner == "node-999"
    assert len(tokens) == 16
    for number in range(1000):
        remote.forget(f"node-{number}")
    assert len(remote.holders) == 0


def test_tokens_until_a_turn_add_up() -> None:
    assert NEXT.tokens_until(len(NEXT.turn_hashes) - 1) == NEXT.tokens
    assert NEXT.tokens_until(1) == pytest.approx(FIRST.tokens, abs=1)
