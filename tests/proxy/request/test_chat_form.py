"""A request of any API becomes the chat that has its prompt, and its answers become messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support import tiny_gguf

from proxy.request.chat_form import (
    Given,
    SentBack,
    chat_answer,
    chat_form,
    next_messages,
    written_arguments,
)
from proxy.upstream.endpoint_kinds import EndpointKind
from supervisor.builds.discover import Engine

MESSAGES, RESPONSES = EndpointKind.MESSAGES, EndpointKind.RESPONSES
REPLY = {"role": "assistant", "content": " a river ", "reasoning_content": "hm " * 20}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1.5}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}}}
RESULT = {"role": "tool"}

THINKING = {"type": "thinking", "thinking": "hm", "signature": ""}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"b": 1.5, "a": "ä"}}
TEXT = {"type": "text", "text": "I look."}
RESULTS = {"type": "tool_result", "tool_use_id": "c1", "content": "a river"}
ASKED: dict[str, Any] = {
    "system": [TEXT, {**TEXT, "text": "x-anthropic-billing-header: cch=a5145;"}],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": [THINKING, TEXT, USE]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, TEXT]},
                TEXT,
            ],
        },
        {"role": "assistant", "content": [THINKING, USE]},
        {
            "role": "user",
            "content": [RESULTS],
        },
    ],
}
REASONED = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message",
    "role": "assistant",
    "id": "m1",
    "content": [{"type": "output_text", "text": "I look."}],
}
CALLING = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"b": 1.5}'}
SEEN = {"type": "function_call_output", "call_id": "c1", "output": "a river"}
GIVEN: dict[str, Any] = {
    "instructions": "Be kind.",
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}, {"type": "web_search"}],
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        REASONED,
        SAID,
        CALLING,
        CALLING,
        SEEN,
        {**SEEN, "output": [{"type": "input_text", "text": "a river"}]},
        REASONED,
        CALLING,
        SEEN,
    ],
}
# It shows all that a template can show.
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def socket(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models") / "shows.gguf"
    model = tiny_gguf.make(path, mode="cycle", chat_template=_TEMPLATE)
    with engines.running(engine, model, "-c", "4096", "-np", "1", "-t", "1") as socket:
        yield socket


@pytest.mark.parametrize(
    ("kind", "page", "members"),
    [
        (MESSAGES, "/v1/messages", ASKED),
        (MESSAGES, "/v1/messages", {"messages": [{"role": "user", "content": "hello"}]}),
        (RESPONSES, "/v1/responses", GIVEN),
        (RESPONSES, "/v1/responses", {"input": "hello " * 20, "reasoning": {"effort": "low"}}),
    ],
)
async def test_the_engine_finds_all_of_the_same_prompt_in_its_cache(
    socket: Path, kind: EndpointKind, page: str, members: dict[str, Any]
) -> None:
    chat = chat_form(kind, {"model": "chat", **members})
    assert chat
    limit = "max_output_tokens" if kind is RESPONSES else "max_tokens"
    answer: dict[str, Any] = {}
    async with engines.proxied(socket, 1) as proxy:
        for path, body in ((page, {**members, limit: 1}), ("/v1/chat/completions", chat)):
            sent = {"model": "chat", **body, "temperature": 0, "store": False, "max_tokens": 1}
            async with proxy.http.post(path, json=sent) as response:
                answer = await response.json()
                assert response.status == 200, answer
    timings = answer["timings"]
    assert timings["prompt_n"] == 1
    assert timings["cache_n"] > 10


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (MESSAGES, {}),
        (MESSAGES, {"messages": 1}),
        (RESPONSES, {}),
        (RESPONSES, {"input": 1}),
        (RESPONSES, {"input": [{"type": "computer_call"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
        (RESPONSES, {"input": "a", "tools": 1}),
        (EndpointKind.CHAT, {"messages": "a"}),
        (EndpointKind.COMPLETION, {"prompt": "a"}),
    ],
)
def test_what_the_engine_refuses_has_no_chat(kind: EndpointKind, members: dict[str, Any]) -> None:
    assert chat_form(kind, members) is None


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (MESSAGES, [THINKING, TEXT, {**USE, "input": {"b": 1.5}}]),
        (RESPONSES, [REASONED, *SAID["content"], CALLING]),
    ],
)
def test_an_answer_becomes_the_message_that_the_next_request_has(
    kind: EndpointKind, content: list[Any]
) -> None:
    answer = chat_answer(kind, {"role": "assistant", "content": content})
    assert answer["content"] == [TEXT]
    assert answer["reasoning_content"] == "hm"
    (call,) = answer["tool_calls"]
    assert call["function"]["name"] == "look"
    assert call["id"] == "c1"
    assert chat_answer(kind, {"content": [{"type": "other"}]})["content"] == ""


@pytest.mark.parametrize(
    ("reply", "sent", "known"),
    [
        (REPLY, {"content": " a river "}, SentBack()),
        (REPLY, {"content": "a river"}, SentBack(is_trimmed=True)),
        (REPLY, {"content": [{"type": "text", "text": "a river"}]}, SentBack(is_trimmed=True)),
        (REPLY, {"content": "another"}, SentBack()),
        (REPLY, {"content": " a river ", "reasoning_content": "h"}, SentBack(has_reasoning=True)),
        (CALLED, {"content": None}, SentBack(has_null=True)),
        (CALLED, {"content": ""}, SentBack()),
    ],
)
def test_what_a_client_sends_back_is_learned(
    reply: Mapping[str, Any], sent: Mapping[str, Any], known: SentBack
) -> None:
    assert SentBack().after(Given.of(reply), sent, RESULT) == known


def _calling(arguments: str, content: str = "") -> dict[str, Any]:
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("sent", "again"),
    [
        ('{"b":  1, "a": "ä"}', '{"d":  1, "c": "ö"}'),
        ('{"b":1,"a":"ä"}', '{"d":1,"c":"ö"}'),
        ('{"b": 1, "a": "ä"}', '{"d": 1, "c": "ö"}'),
        ('{"b": 1, "a": "\\u00e4"}', '{"d": 1, "c": "\\u00f6"}'),
        ('{"a":"ä","b":1}', '{"c":"ö","d":1}'),
        ('{"a": "\\u00e4", "b": 1}', '{"c": "\\u00f6", "d": 1}'),
        ('{"b": 2}', '{"d":  1, "c": "ö"}'),  # another call
    ],
)
def test_how_a_client_writes_the_arguments_of_calls_is_learned(sent: str, again: str) -> None:
    given = Given.of(_calling('{"b":  1, "a": "ä"}'))
    known = SentBack().after(given, _calling(sent), RESULT)
    (call,) = known.message(_calling('{"d":  1, "c": "ö"}'))["tool_calls"]
    assert call == {**CALL, "function": {"name": "look", "arguments": again}}


def test_broken_arguments_stay_as_they_are() -> None:
    assert written_arguments('{"a": ') == {"": '{"a": '}
    assert SentBack(writer="compact").message(_calling('{"a": ')) == _calling('{"a": ')


def test_the_message_that_a_client_sends_back() -> None:
    trimmed = SentBack(is_trimmed=True, has_reasoning=True).message(REPLY)
    assert trimmed == {**REPLY, "content": "a river"}
    assert "reasoning_content" not in SentBack().message(REPLY)
    assert SentBack(has_null=True).message(CALLED) == {**CALLED, "content": None}
    parts = [{"type": "text", "text": " a "}]
    assert SentBack(is_trimmed=True).message({"content": parts})["content"] == [
        {"type": "text", "text": "a"}
    ]


def test_two_next_turns_differ_from_their_last_message_on() -> None:
    first, second = next_messages([{"role": "user", "content": "a"}], REPLY)
    assert first[:-1] == second[:-1]
    assert first[-1]["role"] == "user"


def test_a_call_is_followed_by_its_result_or_the_clients_next_message() -> None:
    after = SentBack().after(Given.of(CALLED), CALLED, {"role": "user", "content": "wait"})
    for known, roles in ((SentBack(), ["tool"]), (after, ["user", "tool"])):
        for messages in next_messages([], CALLED, has_user_first=known.has_user_first):
            assert [message["role"] for message in messages[1:]] == roles
