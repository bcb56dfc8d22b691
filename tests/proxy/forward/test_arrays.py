"""Arrays of prompts that are too much to be taken apart."""

from dataclasses import replace

import orjson
import pytest
from support.requests import ask

from proxy.errors import BadRequest
from proxy.forward.arrays import PromptArray, array_of
from proxy.upstream.endpoint_kinds import EndpointKind


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
