"""llama-server's own completion, assembled from its stream."""

from typing import Any

import pytest

from proxy.forward.assemblers import LlamaCompletionAssembler

PROGRESS: Any = {"content": "", "tokens": [0], "stop": False, "prompt_progress": {"total": 5}}
FIRST: Any = {"content": "a", "tokens": [7], "stop": False}
LETTER: Any = {"content": "ä", "tokens": [9], "stop": False}  # of two tokens: the last of them


def last(predicted: int) -> dict[str, Any]:
    return {"content": "", "tokens": [], "stop": True, "tokens_predicted": predicted}


def assembled(*pieces: dict[str, Any], has_tokens: bool = True) -> LlamaCompletionAssembler:
    assembler = LlamaCompletionAssembler(has_tokens=has_tokens)
    for piece in pieces:
        assembler.add(piece)
    return assembler


def test_the_tokens_are_those_of_the_text() -> None:
    found = assembled(PROGRESS, FIRST, last(1))
    assert not found.is_blank
    assert (found.assemble()["content"], found.assemble()["tokens"]) == ("a", [7])


@pytest.mark.parametrize(("has_tokens", "is_blank"), [(True, True), (False, False)])
def test_a_stream_that_lacks_a_token_is_requested_whole(
    *, has_tokens: bool, is_blank: bool
) -> None:
    found = assembled(FIRST, LETTER, last(3), has_tokens=has_tokens)
    assert found.is_blank is is_blank


def test_unrequested_tokens_are_left_out() -> None:
    assert assembled(FIRST, last(1), has_tokens=False).assemble()["tokens"] == []
