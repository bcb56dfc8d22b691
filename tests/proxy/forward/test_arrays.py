"""Requests for several answers: which are split, and into which requests."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.requests import ask, upstream

from proxy.errors import BadRequest
from proxy.forward.arrays import Fork, PromptArray, array_of, fork_of, joined_usage
from proxy.request.request import ProxyRequest, choices_of
from proxy.router.lease import RoutingTarget
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Rates


def array(prompts: int, beside_bytes: int) -> PromptArray | None:
    members = {"prompt": ["a" * 4000] * prompts, "x": "a" * beside_bytes}
    body = orjson.dumps(members)
    return array_of(replace(ask(), kind=EndpointKind.LLAMA_COMPLETION, json=members, body=body))


def test_what_stands_beside_the_prompts_is_not_sent_a_thousand_times_where_it_is_large() -> None:
    with pytest.raises(BadRequest, match="fewer prompts"):
        array(1000, 100_000)


def test_a_few_large_ones_and_many_small_ones_are_taken_apart() -> None:
    assert array(2, 10_000_000)
    assert array(2000, 1000)


LONG = "the cat is on the mat " * 100


def wide(**members: Any) -> ProxyRequest:
    asked = ask(LONG)
    given = {**asked.json, **members}
    return replace(asked, json=given, body=orjson.dumps(given), slots=choices_of(asked.kind, given))


def fork(request: ProxyRequest, slots: int = 2, *, has_files: bool = False) -> Fork | None:
    engine = upstream("chat.1", slots)
    if has_files:
        engine = replace(engine, cache_key="key", can_name_slots=True)
    return fork_of(request, [RoutingTarget(engine, Rates())])


def parts(found: Fork | None) -> list[tuple[int, object, object]]:
    """Return slots, `n` and `seed` of each part."""
    assert found
    requests = [found.part(at) for at in range(found.count)]
    assert all(part.json == orjson.loads(part.body) for part in requests)
    return [(part.slots, part.json.get("n"), part.json.get("seed")) for part in requests]


def test_answers_that_an_instance_has_slots_for_are_its_own_work() -> None:
    assert fork(wide(n=2)) is None
    assert fork(wide()) is None
    assert fork_of(wide(n=3), []) is None


@pytest.mark.parametrize("members", [{"n": 3.5}, {"n": "3"}, {"n": 5000}, {"n": 3, "n_cmpl": "a"}])
def test_what_an_engine_refuses_is_not_split(members: dict[str, Any]) -> None:
    assert fork(wide(**members)) is None


def test_more_answers_share_a_slot_file_or_fill_the_slots_of_instances() -> None:
    assert parts(fork(wide(n=3), has_files=True)) == [(1, None, None)] * 3
    assert parts(fork(wide(n_cmpl=5))) == [(2, 2, None), (2, 2, None), (1, None, None)]


def test_each_answer_has_the_next_seed_but_a_random_one_stays() -> None:
    seeds = [seed for _, _, seed in parts(fork(wide(n=3, seed=7), has_files=True))]
    assert seeds == [7, 8, 9]
    assert [seed for _, _, seed in parts(fork(wide(n=5, seed=2**32 - 3)))] == [2**32 - 3, 0, 2]
    for random in (-1, 2**32 - 1):
        found = parts(fork(wide(n=3, seed=random), has_files=True))
        assert {seed for _, _, seed in found} == {random}


def test_a_request_too_large_to_be_sent_for_each_answer_is_refused() -> None:
    with pytest.raises(BadRequest, match="fewer answers"):
        fork(wide(n=4000, user="a" * 40_000))


def test_the_usage_counts_the_prompt_once() -> None:
    usages = [{"prompt_tokens": 9, "completion_tokens": at, "total_tokens": 0} for at in (2, 3)]
    assert joined_usage(usages) == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
