"""The body of `POST /v1/batch/completions`."""

from typing import Any

import pytest

from proxy.apis.batch_completions import read_batch
from proxy.errors import BadRequest, LimitExceeded


def members(**given: Any) -> dict[str, Any]:
    prompts, shared = read_batch({"prompts": ["a", "b"], **given}, 64)
    return {**shared, "prompt": prompts[1]}


def test_the_defaults() -> None:
    """seed 003: GpuBatchRequest.prompts, .max_tokens, .temperature, .top_k, .stop."""
    assert members() == {
        "prompt": "b",
        "n_predict": 50,
        "temperature": 0.0,
        "top_k": 50,
        "stop": [],
        "return_tokens": True,
    }


def test_what_is_given_wins_and_other_members_pass() -> None:
    given = {"max_tokens": 7, "temperature": 1, "top_k": 3, "stop": ["x"], "seed": 5, "model": "m"}
    found = members(**given, prompt="not this", response_fields=["content"])
    assert found.pop("n_predict") == given.pop("max_tokens")
    assert found == {**given, "prompt": "b", "return_tokens": True}


def test_llama_servers_own_word_for_the_limit_passes() -> None:
    assert members(n_predict=9)["n_predict"] == 9


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a list of strings"),
        ([], "Prompts array cannot be empty"),
        (["a", ""], "Prompt cannot be empty"),
    ],
)
def test_an_empty_prompt_is_refused(prompts: object, message: str) -> None:
    """seed 003: tokenize_prompt, "Prompt cannot be empty"."""
    with pytest.raises(BadRequest) as refused:
        read_batch({"prompts": prompts}, 64)
    assert (refused.value.status, refused.value.message) == (400, message)


@pytest.mark.parametrize(
    "given",
    [
        {"prompts": "a"},
        {"prompts": ["a", 1]},
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": "3"},
        {"max_tokens": True},
        {"top_k": 1.5},
        {"temperature": "hot"},
        {"stop": ["a", 1]},
        {"n": 2},
    ],
)
def test_a_wrong_type_is_refused(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(BadRequest, match=f"^{name} must be"):
        read_batch({"prompts": ["a"], **given}, 64)


def test_more_prompts_than_may_wait_are_refused() -> None:
    with pytest.raises(LimitExceeded, match=r"3 entries, more than 2; .*queue_size"):
        read_batch({"prompts": ["a", "b", "c"]}, 2)
