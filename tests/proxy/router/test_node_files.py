"""A request takes the slot file of its conversation from another machine, if that is faster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import Prompt, toggle_model_name
from proxy.router.lease import Lease, RoutingTarget
from proxy.router.node_files import NodeFile, NodeFileTaker
from proxy.upstream.upstream import Node, Rates

TOKENS = 4000
QUICK = NodeFile("far", "key", "manifest", TOKENS, 10**6, transfer_s=0.1)
SLOW = replace(QUICK, transfer_s=60.0)


@dataclass
class Source:
    """Has one file, which takes `copy_s` to copy (`NodeFileSource`)."""

    file: NodeFile | None = QUICK
    copy_s: float = 0.1
    asked: list[tuple[str, str]] = field(default_factory=list)
    taken: list[NodeFile] = field(default_factory=list)

    async def find(self, holder: str, cache_key: str, _: Sequence[int], /) -> NodeFile | None:
        self.asked.append((holder, cache_key))
        return self.file

    async def take(self, file: NodeFile, /) -> bool:
        await asyncio.sleep(self.copy_s)
        self.taken.append(file)
        return True


def lease_of(words: int = 4 * TOKENS, *, holder: str = "", known: str | None = None) -> Lease:
    its = replace(upstream("chat.0"), cache_key="key")
    lease = Lease(
        replace(ask("word" * words), holder=holder),
        RoutingTarget(its, Rates(prefill_tps=100.0)),
        asyncio.get_running_loop().time,
    )
    lease.holder = known
    return lease


def take(source: Source, **options: Any) -> float:
    """Return how long it took."""

    took_s: list[float] = []

    async def run() -> None:
        index = PrefixIndex(100_000)
        index.files.set_prefill_rate("key", 100.0)
        taker, lease = NodeFileTaker(index), lease_of(**options)
        taker.connect(source)
        began_at_s = asyncio.get_running_loop().time()
        await taker.take(lease)
        took_s.append(asyncio.get_running_loop().time() - began_at_s)

    run_in_virtual_time(run())
    return took_s[0]


@pytest.mark.parametrize("named", ["by the front", "by our own records"])
def test_a_file_of_the_holder_is_taken(named: str) -> None:
    source = Source()
    take(source, **{"holder" if named == "by the front" else "known": "far"})
    assert source.asked == [("far", "key")]
    assert source.taken == [QUICK]


@pytest.mark.parametrize("options", [{}, {"known": ""}, {"holder": "far", "words": 30}])
def test_nobody_is_asked_without_a_holder_or_for_a_short_prompt(options: dict[str, Any]) -> None:
    source = Source()
    take(source, **options)
    assert source.asked == []


@pytest.mark.parametrize("file", [None, SLOW, replace(QUICK, size_bytes=10**11)])
def test_a_file_that_takes_longer_than_the_prompt_is_not_taken(file: NodeFile | None) -> None:
    source = Source(file)
    take(source, holder="far")
    assert source.asked
    assert source.taken == []


def test_a_slow_copy_that_no_request_awaits_pays() -> None:
    index = PrefixIndex(100_000)
    index.files.set_prefill_rate("key", 100.0)
    assert NodeFileTaker(index).pays(SLOW, 0)
    assert not NodeFileTaker(index).pays(SLOW, 0, SLOW.transfer_s)
    assert not NodeFileTaker(index).pays(SLOW, TOKENS)


def test_a_copy_is_given_up_when_it_takes_too_long() -> None:
    source = Source(copy_s=10_000.0)
    assert 5 < take(source, holder="far") <= 30
    assert source.taken == []


def test_the_process_that_has_a_conversation_is_known_by_its_node() -> None:
    index = PrefixIndex(1000)
    one = replace(upstream("one/chat"), node=Node("one", "chat", process="p1"))
    other, here = replace(upstream("two/chat"), node=Node("two", "chat")), upstream("chat.0")
    serving = {one.name, other.name, here.name}
    for its in (one, other, here):
        index.register(its)
    prompt = ask("a question").prompt
    assert isinstance(prompt, Prompt)
    for its, process in ((one, "p1"), (other, None), (here, "")):
        index.assign(its, prompt, None, index.look_up(prompt, None))
        hint = index.look_up(prompt, None)
        assert index.holder(hint, its.name, serving.__contains__) is None
        assert index.holder(hint, "another", serving.__contains__) == process
    index.register(replace(one, node=Node("one", "chat", process="p2")))  # it was restarted
    index.assign(one, prompt, None, index.look_up(prompt, None))
    hint = index.look_up(prompt, None)
    assert index.holder(hint, "another", serving.__contains__) == "p2"


def test_a_conversation_is_copied_from_the_node_that_took_it_from_a_node_that_ended() -> None:
    index = PrefixIndex(1000)
    ended, taker = (
        replace(upstream(f"{node}/chat"), node=Node(node, "chat", process=node)) for node in "ab"
    )
    for its in (ended, taker):
        index.register(its)
    prompt = ask("a question").prompt
    assert isinstance(prompt, Prompt)
    index.assign(ended, prompt, None, index.look_up(prompt, None))
    turns = map(prompt.shared_turn_hash, prompt.turn_hashes)
    index.add_remote(taker, [toggle_model_name(turn, "chat") for turn in turns])
    hint = index.look_up(prompt, None)
    assert index.holder(hint, "c/chat", {"a/chat", "b/chat"}.__contains__) == "a"
    assert index.holder(hint, "c/chat", {"b/chat"}.__contains__) == "b"
    assert index.holder(hint, "b/chat", {"b/chat"}.__contains__) is None
    assert index.holder(hint, "c/chat", set[str]().__contains__) == "a"
