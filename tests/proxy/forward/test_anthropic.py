"""A request of Anthropic's API becomes the chat request that the engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.forward.anthropic import schema_of
from proxy.request.chat_form import anthropic_chat

SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
HELLO = {"role": "user", "content": "hello"}


def asked(**members: Any) -> dict[str, Any]:
    return anthropic_chat({"model": "chat", "messages": [HELLO], **members})


def messages(*given: Any, **members: Any) -> Any:
    return asked(messages=list(given), **members)["messages"]


@pytest.mark.parametrize(
    ("members", "schema"),
    [
        ({"output_config": {"format": FORMAT}}, SCHEMA),
        ({"output_format": FORMAT}, SCHEMA),
        ({"output_config": {"effort": "low"}}, None),
        ({"output_config": {"format": {"type": "json_schema"}}}, None),
        ({"output_config": 3, "output_format": [4]}, None),
        ({}, None),
    ],
)
def test_a_schema_is_found(members: dict[str, Any], schema: object) -> None:
    assert schema_of(members) == schema


def test_the_format_and_the_limits_are_the_chat_apis() -> None:
    assert asked(
        max_tokens=5, stop_sequences=["a"], top_k=3, stream=True, metadata={"user_id": "a"}
    ) == {
        "model": "chat",
        "messages": [HELLO],
        "max_tokens": 5,
        "stop": ["a"],
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked()["max_tokens"] == 4096


@pytest.mark.parametrize(
    "system", ["Be short.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]]
)
def test_the_system_prompt_is_a_message(system: object) -> None:
    assert messages(HELLO, system=system) == [{"role": "system", "content": "Be short."}, HELLO]


def test_tools_are_used_over_several_turns() -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "c"}]}
    after = {"type": "text", "text": "on"}
    assert messages(
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result, after]},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"b":1}'},
                }
            ],
        },
        {"role": "user", "content": [after]},
        {"role": "tool", "tool_call_id": "a", "content": "c"},
    ]


def test_images_are_passed() -> None:
    data = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    images = [
        {"type": "image", "source": source} for source in (data, {"type": "url", "url": "http://a"})
    ]
    parts = [
        {"type": "image_url", "image_url": {"url": url}}
        for url in ("data:image/png;base64,AA==", "http://a")
    ]
    assert messages({"role": "user", "content": images}) == [{"role": "user", "content": parts}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": images}
    (message,) = messages({"role": "user", "content": [result]})
    assert message["content"] == parts


@pytest.mark.parametrize(
    ("choice", "asks"), [("auto", "auto"), ("any", "required"), ("tool", "required")]
)
def test_tools_are_functions(choice: str, asks: str) -> None:
    tool = {"name": "f", "input_schema": SCHEMA}
    found = asked(tools=[tool], tool_choice={"type": choice}, thinking={"type": "enabled"})
    function = {"name": "f", "description": "", "parameters": SCHEMA}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert found["tool_choice"] == asks
    assert found["thinking_budget_tokens"] == 10_000


@pytest.mark.parametrize("wrong", [3, {"role": 1, "content": []}, {"role": "user"}])
def test_what_is_no_message_is_the_engines_to_refuse(wrong: object) -> None:
    assert messages(wrong) == [wrong]
