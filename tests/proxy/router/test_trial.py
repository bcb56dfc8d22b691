"""Which conversations a trial gets, and that no request waits for a trial."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from support.requests import ask, upstream

from proxy.cache.prompt import read_prompt
from proxy.request.request import ProxyRequest
from proxy.router.candidates import is_in_share
from proxy.router.lease import Completion
from proxy.router.router import Router
from proxy.settings import Policy, ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Upstream

SYSTEM = {"role": "system", "content": "You write verse, and nothing but verse. " * 8}


def on_trial(share: float = 0.2, slots: int = 4) -> Upstream:
    return replace(upstream("chat.1", slots), trial_share=share)


def routed(*upstreams: Upstream, policy: Policy = "affinity") -> Router:
    router = Router(ProxySettings(policy=policy))
    for target in upstreams:
        router.admit(target)
    return router


async def answer(router: Router, request: ProxyRequest, reply: str | None = None) -> str:
    async with router.lease(request) as lease:
        said = {"role": "assistant", "content": reply} if reply else None
        router.finish(lease, Completion(reply=said))
        return lease.upstream.name


def in_trial(number: int = 0) -> str:
    """Return a text that begins a conversation of the trial at a share of a half."""
    texts = (f"question {at}" for at in range(1000))
    return [text for text in texts if is_in_share(0.5, ask(text))][number]


@pytest.mark.parametrize("policy", ["affinity", "least-busy", "round-robin"])
async def test_new_conversations_are_shared_as_set(policy: Policy) -> None:
    router = routed(upstream("chat.0", 4), on_trial(0.2), policy=policy)
    names = Counter([await answer(router, ask(f"question {at}")) for at in range(500)])
    assert names["chat.1"] == pytest.approx(100, abs=30)
    assert names["chat.0"] == 500 - names["chat.1"]


@pytest.mark.parametrize("policy", ["affinity", "least-busy", "round-robin"])
async def test_all_turns_of_a_conversation_stay_also_after_a_restart(policy: Policy) -> None:
    sides: dict[int, set[str]] = {}
    for _ in range(2):
        router = routed(upstream("chat.0", 4), on_trial(0.5), policy=policy)
        for at in range(40):
            said = [f"question {at}"]
            for turn in range(4):
                sides.setdefault(at, set()).add(await answer(router, ask(*said), f"so {turn}"))
                said += [f"so {turn}", f"and {turn}?"]
    assert {len(names) for names in sides.values()} == {1}
    assert len({name for names in sides.values() for name in names}) == 2


async def test_a_conversation_without_cache_stays_by_its_name() -> None:
    router = routed(upstream("chat.0", 4), on_trial(0.5), policy="round-robin")
    for session in ("one", "two", "three", "four"):
        asked = [ask(f"text {at}", session=session) for at in range(5)]
        assert len({await answer(router, request) for request in asked}) == 1


async def test_nobody_waits_while_the_other_side_has_a_slot() -> None:
    router = routed(upstream("chat.0", 1), on_trial(0.5, slots=1))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(router.lease(ask(in_trial(0))))
        second = await stack.enter_async_context(router.lease(ask(in_trial(1))))
        assert (first.upstream.name, second.upstream.name) == ("chat.1", "chat.0")
        assert (first.is_diverted, second.is_diverted) == (False, True)


async def test_a_conversation_that_left_a_trial_out_of_service_does_not_return() -> None:
    router = routed(upstream("chat.0", 2), on_trial(0.5))
    text = in_trial()
    assert await answer(router, ask(text), "so") == "chat.1"
    router.withdraw("chat.1")
    assert await answer(router, ask(text, "so", "and?"), "well") == "chat.0"
    router.admit(replace(on_trial(0.5), api_key="of the next run"))
    assert await answer(router, ask(text, "so", "and?", "well", "then?")) == "chat.0"
    assert await answer(router, ask(in_trial(1))) == "chat.1"


async def test_a_conversation_that_is_older_than_the_trial_stays() -> None:
    router = routed(upstream("chat.0", 2))
    text = in_trial()
    assert await answer(router, ask(text), "so") == "chat.0"
    router.admit(on_trial(0.5))
    assert await answer(router, ask(text, "so", "and?")) == "chat.0"


async def test_what_needs_no_slot_goes_to_the_models_own_profile() -> None:
    router = routed(on_trial(0.9), upstream("chat.0", 1))
    async with AsyncExitStack() as stack:
        asked = (ask("x", kind=EndpointKind.INFO) for _ in range(3))
        leases = [await stack.enter_async_context(router.lease(request)) for request in asked]
        assert {lease.upstream.name for lease in leases} == {"chat.0"}


def test_a_larger_share_contains_a_smaller_one() -> None:
    asked = [ask(f"question {at}") for at in range(200)]
    few, many = ([is_in_share(share, request) for request in asked] for share in (0.2, 0.6))
    assert all(more for fewer, more in zip(few, many, strict=True) if fewer)


def test_clients_that_begin_alike_are_told_apart() -> None:
    asked = [ask("hello", client=f"client {at}") for at in range(100)]
    assert 20 < sum(is_in_share(0.5, request) for request in asked) < 80


def test_requests_without_a_prompt_are_shared_one_by_one() -> None:
    requests = [
        replace(ask("x", kind=EndpointKind.EMBED_OR_RERANK), request_id=str(at), prompt=None)
        for at in range(100)
    ]
    assert 20 < sum(is_in_share(0.5, request) for request in requests) < 80


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (EndpointKind.CHAT, {"messages": [SYSTEM, {"role": "user", "content": "Where?"}]}),
        (
            EndpointKind.MESSAGES,
            {"system": "short", "messages": [{"role": "user", "content": "Where?"}]},
        ),
        (EndpointKind.RESPONSES, {"instructions": "other", "input": "Where?"}),
    ],
)
def test_a_conversation_begins_with_the_first_message_of_a_user(
    kind: EndpointKind, members: dict[str, Any]
) -> None:
    found, plain = read_prompt(kind, "chat", members), ask("Where?", "There.", "Why?").prompt
    assert found
    assert plain
    assert found.beginning == plain.beginning
