"""The bytes that an instance gets for a request."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.requests import ask

from proxy.forward.relay import UpstreamRequestPlan, plan_request
from proxy.http.forms import Form, Part
from proxy.upstream.endpoint_kinds import EndpointKind

CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


def plan(kind: EndpointKind = EndpointKind.CHAT, **members: Any) -> UpstreamRequestPlan:
    return plan_of(kind, orjson.dumps({**CHAT, **members}))


def plan_of(kind: EndpointKind, body: bytes) -> UpstreamRequestPlan:
    return plan_request(replace(ask(), kind=kind, json=orjson.loads(body), body=body))


@pytest.mark.parametrize("kind", [EndpointKind.CHAT, EndpointKind.COMPLETION])
def test_a_whole_client_response_is_asked_as_a_stream(kind: EndpointKind) -> None:
    asked = plan(kind)
    assert orjson.loads(asked.body) == {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    assert asked == UpstreamRequestPlan(
        asked.body,
        is_stream=True,
        is_assembled=True,
        hides_progress=True,
    )


def test_what_the_client_wrote_stays_as_it_is() -> None:
    body = b'{ "seed": 18446744073709551616, "prompt" : "\\u00e4" } '
    shaped_body = plan_of(EndpointKind.COMPLETION, body).body
    assert shaped_body.startswith(b'{ "seed": 18446744073709551616, "prompt" : "\\u00e4" ,')


def test_an_empty_object_can_be_added_to() -> None:
    assert orjson.loads(plan_of(EndpointKind.CHAT, b"{}").body)["stream"] is True


def test_a_member_that_says_no_is_replaced_and_not_repeated() -> None:
    asked = plan(stream=False, stream_options={"other": 1}, return_progress=False)
    assert asked.body.count(b'"stream"') == 1
    said = orjson.loads(asked.body)
    assert (said["stream"], said["return_progress"]) == (True, True)
    assert said["stream_options"] == {"other": 1, "include_usage": True}


def test_what_replaces_a_member_of_a_large_body_comes_last() -> None:
    body = orjson.dumps({"stream": False, **CHAT, "text": "a" * 2_000_000})
    asked = plan_of(EndpointKind.CHAT, body).body
    assert asked.startswith(body[:-1])
    assert orjson.loads(asked)["stream"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", True),
        ("logprobs", 2),
        ("n_probs", 2),
        ("verbose", True),
        ("return_tokens", True),
        ("response_fields", ["content"]),
        ("continue_final_message", True),
    ],
)
def test_what_a_stream_would_not_tell_is_asked_whole(name: str, value: object) -> None:
    body = orjson.dumps({**CHAT, name: value})
    asked = plan_of(EndpointKind.CHAT, body)
    assert asked.body == body
    assert not asked.is_stream


@pytest.mark.parametrize(("wanted", "is_stream"), [(True, True), (1, False)])
def test_token_ids_of_llama_servers_own_completion_are_assembled(
    wanted: object, *, is_stream: bool
) -> None:
    body = orjson.dumps({**CHAT, "return_tokens": wanted})
    asked = plan_of(EndpointKind.LLAMA_COMPLETION, body)
    assert (asked.is_stream, asked.is_assembled) == (is_stream, is_stream)


@pytest.mark.parametrize("stream", ["yes", 1, 0])
def test_a_stream_member_that_is_no_boolean_is_for_the_engine_to_refuse(stream: object) -> None:
    assert plan(stream=stream).body == orjson.dumps({**CHAT, "stream": stream})


@pytest.mark.parametrize(
    "kind", [EndpointKind.CHAT, EndpointKind.LLAMA_COMPLETION, EndpointKind.INFILL]
)
def test_a_stream_is_asked_with_its_progress(kind: EndpointKind) -> None:
    asked = plan(kind, stream=True)
    assert orjson.loads(asked.body) == {**CHAT, "stream": True, "return_progress": True}
    assert (asked.is_stream, asked.is_assembled, asked.hides_progress) == (True, False, True)


def test_a_stream_that_progress_would_change_is_asked_as_the_client_wrote_it() -> None:
    prefilled = [*CHAT["messages"], {"role": "assistant", "content": "Hel"}]
    for asked in (
        plan(stream=True, messages=prefilled),
        plan(EndpointKind.RESPONSES, stream=True),
    ):
        assert b"return_progress" not in asked.body
        assert not asked.hides_progress
    assert b"return_progress" in plan(messages=prefilled).body


def test_a_client_that_asks_for_progress_gets_its_own_body_through() -> None:
    asked = plan(stream=True, return_progress=True)
    assert asked.body == orjson.dumps({**CHAT, "stream": True, "return_progress": True})
    assert not asked.hides_progress


@pytest.mark.parametrize(
    "members",
    [{"n": 2}, {"n_cmpl": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}],
)
def test_progress_of_several_answers_at_once_is_not_asked_for(members: dict[str, Any]) -> None:
    assert b"return_progress" not in plan(EndpointKind.COMPLETION, stream=True, **members).body


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [1, "a", 2]])
def test_one_prompt_in_any_form_tells_its_progress(prompt: object) -> None:
    assert b"return_progress" in plan(EndpointKind.COMPLETION, stream=True, prompt=prompt).body


@pytest.mark.parametrize(
    "kind", [EndpointKind.MESSAGES, EndpointKind.RESPONSES, EndpointKind.LLAMA_COMPLETION]
)
def test_a_page_without_options_for_its_stream_is_given_none(kind: EndpointKind) -> None:
    asked = plan(kind)
    assert asked.is_assembled
    assert b"stream_options" not in asked.body


def test_progress_that_a_page_does_not_tell_is_not_asked_for() -> None:
    assert orjson.loads(plan(EndpointKind.MESSAGES).body) == {**CHAT, "stream": True}


@pytest.mark.parametrize("members", [{"prompt": ["a", "b"]}, {"n_cmpl": 2}])
def test_several_completions_at_once_on_the_engines_own_page_pass(members: dict[str, Any]) -> None:
    asked = plan(EndpointKind.LLAMA_COMPLETION, **members)
    assert (asked.is_stream, asked.body) == (False, orjson.dumps({**CHAT, **members}))


@pytest.mark.parametrize("kind", [EndpointKind.INFILL, EndpointKind.EMBED_OR_RERANK])
def test_every_other_page_passes_byte_for_byte(kind: EndpointKind) -> None:
    assert plan(kind).body == orjson.dumps(CHAT)
    assert plan(EndpointKind.MESSAGES, stream=True).body == orjson.dumps({**CHAT, "stream": True})


@pytest.mark.parametrize(
    "kind", [EndpointKind.EMBED_OR_RERANK, EndpointKind.INFO, EndpointKind.TRANSCRIPTION]
)
def test_a_page_that_does_not_stream_does_not_because_the_body_says_so(kind: EndpointKind) -> None:
    assert not plan(kind, stream=True).is_stream


def test_a_form_is_no_object_to_add_to() -> None:
    said = Form((Part("model", b"chat"),))
    form = replace(ask(), json={"model": "chat"}, body=b"--x--", form=said)
    assert plan_request(form).body == b"--x--"
