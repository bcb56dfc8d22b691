"""Requests for plain generation, as llama-server gets them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.apis.generate import completion_of, read_batch, with_model
from proxy.errors import BadRequest


def asked(**members: Any) -> dict[str, Any]:
    return completion_of({"prompt": "a", **members}, is_stream=False)


def sampling(**members: Any) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: value for name, value in asked(**members).items() if name in names}


def test_a_prompt_alone_is_completed_greedily_by_50_tokens() -> None:
    """Seed 003: GenerateRequest's max_tokens 50 and strategy greedy."""
    assert asked() == {
        "prompt": "a",
        "n_predict": 50,
        "temperature": 0,
        "stream": False,
        "return_tokens": True,
    }


def test_one_strategy_samples_with_its_own_member_only() -> None:
    """Seed 003: GenerateRequest's strategies, temperature 1, top_k 50 and top_p 0.9."""
    assert sampling(strategy="top_k") == {"temperature": 1.0, "top_k": 50, "top_p": 1, "min_p": 0}
    assert sampling(strategy="top_p") == {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0}
    assert sampling(strategy="greedy", temperature=0.7, top_k=9, top_p=0.5) == {"temperature": 0}
    chosen = sampling(strategy="top_k", temperature=0.7, top_k=9, top_p=0.5)
    assert chosen == {"temperature": 0.7, "top_k": 9, "top_p": 1, "min_p": 0}


def test_without_a_strategy_the_members_that_were_given_decide() -> None:
    assert sampling(temperature=0.7) == {"temperature": 0.7, "top_k": 50, "top_p": 1, "min_p": 0}
    assert sampling(top_k=3) == {"temperature": 1.0, "top_k": 3, "top_p": 1, "min_p": 0}
    assert sampling(top_p=0.5, top_k=3) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.5,
        "min_p": 0,
    }
    assert sampling(temperature=None, top_k=None, strategy=None) == {"temperature": 0}


def test_an_unknown_strategy_is_refused() -> None:
    """Seed 003: a strategy that does not exist is an error of the client."""
    with pytest.raises(BadRequest, match="Invalid strategy: 'beam'"):
        asked(strategy="beam")


def test_a_seed_and_a_model_are_passed() -> None:
    """Seed 003: GenerateRequest's seed and model_id."""
    assert asked(seed=7, model_id="chat").items() >= {"seed": 7, "model": "chat"}.items()
    assert "model_id" not in asked(model_id="chat")
    assert with_model({"model": "a", "model_id": "b"}) == {"model": "a"}


def test_llama_servers_own_members_are_passed() -> None:
    passed = asked(grammar='root ::= "x"', strategy="top_k", min_p=0.1, stream=True)
    assert passed["grammar"] == 'root ::= "x"'
    assert passed["min_p"] == 0.1
    assert passed["stream"] is False


@pytest.mark.parametrize("name", ["n", "n_cmpl", "response_fields"])
def test_what_would_change_the_format_of_the_answer_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"the member {name} has no meaning here"):
        asked(**{name: 2})
    assert name not in asked(**{name: None})


def test_an_empty_prompt_is_refused() -> None:
    """Seed 003: "Prompt cannot be empty"."""
    with pytest.raises(BadRequest, match=r"^Prompt cannot be empty$"):
        asked(prompt="")
    with pytest.raises(BadRequest, match=r"^Prompt cannot be empty$"):
        read_batch({"prompts": ["a", ""]}, 64)


def test_several_prompts_share_the_other_members() -> None:
    """Seed 003: BatchGenerateRequest."""
    members = {"prompts": ["a", "b"], "max_tokens": 3, "strategy": "top_k"}
    prompts, shared = read_batch(members, 64)
    assert (prompts, shared["n_predict"], shared["top_k"]) == (["a", "b"], 3, 50)


def test_no_prompts_are_refused() -> None:
    """Seed 003: a batch without a prompt is an error of the client."""
    with pytest.raises(BadRequest, match="Prompts array cannot be empty"):
        read_batch({"prompts": []}, 64)


@pytest.mark.parametrize(
    "members",
    [
        {"prompt": None},
        {"prompt": ["a"]},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"max_tokens": 0},
        {"top_k": 0},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(members: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        asked(**members)


@pytest.mark.parametrize("prompts", [None, "a", [1], [["a"]]], ids=str)
def test_prompts_are_a_list_of_strings(prompts: object) -> None:
    with pytest.raises(BadRequest, match="string"):
        read_batch({"prompts": prompts}, 64)
