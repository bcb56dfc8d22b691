"""The whole answer out of pieces that no engine sends twice in the same order."""

from typing import Any

import pytest

from proxy.forward.assemblers import ChatAssembler
from proxy.upstream.http1 import InvalidEvent


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
    assembler = ChatAssembler(is_chat=False)
    for index in order:
        assembler.add(piece(index, f"{index}"))
    for index in order:
        assembler.add(piece(index, "!", "length", usage=usage(index)))
    whole = assembler.assemble()
    assert [choice["text"] for choice in whole["choices"]] == ["0!", "1!"]
    assert whole["usage"] == usage(0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_figures_that_follow_the_end_belong_to_the_choice_that_ended(
    order: tuple[int, int],
) -> None:
    assembler = ChatAssembler(is_chat=False)
    for index in (0, 1):
        assembler.add(piece(index, "x"))
    for index in order:
        assembler.add(piece(index, "", "stop"))
        assembler.add({"choices": [], "usage": usage(index), "timings": {"cache_n": index}})
    assert assembler.assemble()["usage"] == usage(0)
    assert assembler.timings() == {"cache_n": 0}


def test_an_client_response_is_complete_once_all_of_it_has_ended() -> None:
    assembler = ChatAssembler(is_chat=False)
    assert not assembler.is_complete
    assembler.add(piece(0, "x", "stop"))
    assembler.add(piece(1, "x"))
    assert not assembler.is_complete
    with pytest.raises(InvalidEvent, match="before the answer was complete"):
        assembler.assemble()


def test_members_that_we_do_not_know_are_kept() -> None:
    assembler = ChatAssembler(is_chat=False)
    assembler.add(piece(0, "x", "stop", system_fingerprint="b1", prompt_progress={}))
    whole = assembler.assemble()
    assert (whole["system_fingerprint"], whole["model"]) == ("b1", "chat")
    assert "prompt_progress" not in whole


def test_choices_without_end_are_given_up() -> None:
    assembler = ChatAssembler(is_chat=False)
    for index in range(1024):
        assembler.add(piece(index, "x"))
    with pytest.raises(InvalidEvent, match="more than 1024 choices"):
        assembler.add(piece(1024, "x"))
