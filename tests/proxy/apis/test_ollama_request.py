"""Requests of Ollama's API as an engine gets them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.apis.ollama_translation import EngineRequest, chat, embed, embeddings, generate
from proxy.errors import BadRequest
from proxy.upstream.endpoint_kinds import EndpointKind

HELLO = [{"role": "user", "content": "hello"}]


def asked(request: EngineRequest | None) -> dict[str, Any]:
    assert request
    return request.members


def test_a_chat_is_streamed_unless_it_says_no() -> None:
    given = asked(chat({"messages": HELLO}))
    assert given == {
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert asked(chat({"messages": HELLO, "stream": False})) == {
        "messages": HELLO,
        "stream": False,
    }


def test_options_are_members_and_others_are_named() -> None:
    options = {
        "temperature": 0.5,
        "num_predict": 7,
        "num_keep": 3,
        "stop": ["x"],
        "seed": None,
        "num_ctx": 9,
        "mystery": 1,
    }
    request = chat({"messages": HELLO, "stream": False, "options": options, "template": "{{ . }}"})
    assert asked(request) == {
        "messages": HELLO,
        "stream": False,
        "temperature": 0.5,
        "n_predict": 7,
        "n_keep": 3,
        "stop": ["x"],
    }
    assert request
    assert request.ignored == ("num_ctx", "mystery", "template")


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_no_limit_is_none(limit: int) -> None:
    assert "n_predict" not in asked(chat({"messages": HELLO, "options": {"num_predict": limit}}))


@pytest.mark.parametrize(
    ("think", "expected"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
        (None, None),
    ],
)
def test_how_to_think_is_for_the_template(think: object, expected: object) -> None:
    given = asked(chat({"messages": HELLO, "think": think}))
    assert given.get("chat_template_kwargs") == expected


def test_a_format_is_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    for given, expected in (("json", {"type": "object"}), (schema, schema)):
        made = asked(chat({"messages": HELLO, "format": given}))
        assert made["json_schema"] == expected
        raw = generate({"prompt": "a", "raw": True, "format": given})
        assert asked(raw)["json_schema"] == expected


def test_images_are_parts_of_their_message() -> None:
    message = {"role": "user", "content": "what?", "images": ["iVBORw0KGgo=", "/9j/4"]}
    (made,) = asked(chat({"messages": [message]}))["messages"]
    text, png, jpeg = made["content"]
    assert text == {"type": "text", "text": "what?"}
    assert png["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
    assert jpeg["image_url"]["url"] == "data:image/jpeg;base64,/9j/4"


def test_results_belong_to_the_calls_before_them() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}}

    messages = [
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [call("f"), call("g")],
        },
        {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
        {"role": "tool", "content": "of nothing"},
    ]
    said, of_g, of_f, other = asked(chat({"messages": messages}))["messages"]
    assert said["reasoning_content"] == "hm"
    first, second = said["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert (of_g["tool_call_id"], of_g["name"]) == (second["id"], "g")
    assert (of_f["tool_call_id"], of_f["name"]) == (first["id"], "f")
    assert other["tool_call_id"] == ""


def test_a_prompt_is_a_chat_a_completion_or_a_gap() -> None:
    of_chat = generate({"prompt": "a", "system": "s", "images": ["/9j/"]})
    assert of_chat
    assert (of_chat.path, of_chat.kind) == ("/v1/chat/completions", EndpointKind.CHAT)
    assert [message["role"] for message in of_chat.members["messages"]] == ["system", "user"]
    raw = generate({"prompt": "a", "raw": True, "stream": False})
    assert raw
    assert (raw.path, raw.kind) == ("/completion", EndpointKind.LLAMA_COMPLETION)
    assert raw.members == {"prompt": "a", "stream": False}
    gap = generate({"prompt": "a", "suffix": "b", "stream": False})
    assert gap
    assert (gap.path, gap.kind) == ("/infill", EndpointKind.INFILL)
    assert gap.members == {"input_prefix": "a", "input_suffix": "b", "stream": False}


@pytest.mark.parametrize("translate", [chat, generate, embed, embeddings])
def test_a_request_without_a_prompt_only_loads_the_model(translate: Any) -> None:
    assert translate({"model": "chat", "messages": [], "prompt": "", "input": []}) is None


@pytest.mark.parametrize(
    ("translate", "members", "message"),
    [
        (chat, {"messages": "hello"}, "messages must be a list"),
        (chat, {"messages": ["hello"]}, "each message must be an object"),
        (chat, {"messages": HELLO, "options": 3}, "options must be an object"),
        (chat, {"messages": HELLO, "format": 3}, "format must be"),
        (chat, {"messages": [{"images": "x"}]}, "images must be a list"),
        (chat, {"messages": [{"images": [3]}]}, "image must be a string"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls must be"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "each tool call"),
        (generate, {"prompt": 3}, "prompt must be a string"),
        (embed, {"input": "a", "dimensions": "b"}, "dimensions must be"),
    ],
)
def test_what_means_nothing_is_refused(
    translate: Any, members: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        translate(members)
