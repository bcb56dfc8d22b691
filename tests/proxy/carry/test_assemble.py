"""The whole answer out of pieces that no engine sends twice in the same order."""

from typing import Any

import pytest

from proxy.carry.assemble import Assembly
from proxy.carry.sse import Garbled


def piece(
    index: int, text: str, finish_reason: str | None = None, **members: Any
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "a", "model": "chat", "choices": [choice], **members}


def usage(tokens: int) -> dict[str, Any]:
    return {"completion_tokens": tokens}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_figures_are_those_of_the_first_choice_whichever_ends_first(
    order: tuple[int, int],
) -> None:
    assembly = Assembly(is_chat=False)
    for index in order:
        assembly.add(piece(index, f"{index}"))
    for index in order:
        assembly.add(piece(index, "!", "length", usage=usage(index)))
    whole = assembly.whole()
    assert [choice["text"] for choice in whole["choices"]] == ["0!", "1!"]
    assert whole["usage"] == usage(0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_figures_that_follow_the_end_belong_to_the_choice_that_ended(
    order: tuple[int, int],
) -> None:
    assembly = Assembly(is_chat=False)
    for index in (0, 1):
        assembly.add(piece(index, "x"))
    for index in order:
        assembly.add(piece(index, "", "stop"))
        assembly.add({"choices": [], "usage": usage(index), "timings": {"cache_n": index}})
    assert assembly.whole()["usage"] == usage(0)
    assert assembly.timings() == {"cache_n": 0}


def test_an_answer_is_complete_once_all_of_it_has_ended() -> None:
    assembly = Assembly(is_chat=False)
    assert not assembly.is_complete
    assembly.add(piece(0, "x", "stop"))
    assembly.add(piece(1, "x"))
    assert not assembly.is_complete
    with pytest.raises(Garbled, match="before the answer was complete"):
        assembly.whole()


def test_members_that_we_do_not_know_are_kept() -> None:
    assembly = Assembly(is_chat=False)
    assembly.add(piece(0, "x", "stop", system_fingerprint="b1", prompt_progress={}))
    whole = assembly.whole()
    assert (whole["system_fingerprint"], whole["model"]) == ("b1", "chat")
    assert "prompt_progress" not in whole


def test_choices_without_end_are_given_up() -> None:
    assembly = Assembly(is_chat=False)
    for index in range(1024):
        assembly.add(piece(index, "x"))
    with pytest.raises(Garbled, match="more than 1024 choices"):
        assembly.add(piece(1024, "x"))
