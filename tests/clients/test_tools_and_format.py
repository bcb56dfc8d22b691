"""Tools and a format in one request: each API, each choice, whole and as a stream."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
CAPITAL = "What is the capital of France?"
TOOLS = {"get_weather": "the weather in a city", "get_time": "the time in a city"}
# A call by its name, or the text of an answer.
Answer = tuple[str, str]


def chat(url: str, choice: str | None, *, asks_weather: bool, is_stream: bool) -> Answer:
    def call(city: str) -> list[dict[str, Any]]:
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        return [
            {"role": "user", "content": f"Weather in {city}?"},
            {
                "role": "assistant",
                "tool_calls": [{"id": city, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": city, "content": "warm"},
        ]

    messages = [*call("Rome"), *call("Oslo")] if asks_weather else []
    question = "Weather in Paris?" if asks_weather else CAPITAL
    named = {"type": "function", "function": {"name": choice}}
    body = {
        "messages": [*messages, {"role": "user", "content": question}],
        "max_tokens": 60,
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "description": text, "parameters": PARAMETERS},
            }
            for name, text in TOOLS.items()
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "strict": True, "schema": SCHEMA},
        },
        **({"tool_choice": named if choice in TOOLS else choice} if choice else {}),
    }
    answer = ask(f"{url}/v1/chat/completions", body, is_stream=is_stream)
    if not is_stream:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or [{"function": {"name": ""}}]
        return calls[0]["function"]["name"], message["content"]
    deltas = [part["delta"] for event in answer for part in event.get("choices", ())]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    name = "".join(call["function"].get("name") or "" for call in calls)
    return name, "".join(delta.get("content") or "" for delta in deltas)


def respond(url: str, choice: str | None, *, asks_weather: bool, is_stream: bool) -> Answer:
    def call(city: str) -> list[dict[str, Any]]:
        arguments = json.dumps({"city": city})
        return [
            {"role": "user", "content": f"Weather in {city}?"},
            {
                "type": "function_call",
                "call_id": city,
                "name": "get_weather",
                "arguments": arguments,
            },
            {"type": "function_call_output", "call_id": city, "output": "warm"},
        ]

    items = [*call("Rome"), *call("Oslo")] if asks_weather else []
    question = "Weather in Paris?" if asks_weather else CAPITAL
    named = {"type": "function", "name": choice}
    body = {
        "input": [*items, {"role": "user", "content": question}],
        "max_output_tokens": 60,
        "tools": [
            {"type": "function", "name": name, "description": text, "parameters": PARAMETERS}
            for name, text in TOOLS.items()
        ],
        "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
        **({"tool_choice": named if choice in TOOLS else choice} if choice else {}),
    }
    answer = ask(f"{url}/v1/responses", body, is_stream=is_stream)
    response = answer[-1]["response"] if is_stream else answer
    calls = [item["name"] for item in response["output"] if item["type"] == "function_call"]
    texts = [
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    return "".join(calls), "".join(texts)


def message(url: str, choice: str | None, *, asks_weather: bool, is_stream: bool) -> Answer:
    def call(city: str) -> list[dict[str, Any]]:
        use = {"type": "tool_use", "id": city, "name": "get_weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": city, "content": "warm"}
        return [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]

    messages = [*call("Rome"), *call("Oslo")] if asks_weather else []
    question = "Weather in Paris?" if asks_weather else CAPITAL
    kinds = {"required": {"type": "any"}, "get_time": {"type": "tool", "name": "get_time"}}
    body = {
        "messages": [*messages, {"role": "user", "content": question}],
        "max_tokens": 60,
        "tools": [
            {"name": name, "description": text, "input_schema": PARAMETERS}
            for name, text in TOOLS.items()
        ],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        **({"tool_choice": kinds.get(choice, {"type": choice})} if choice else {}),
    }
    answer = ask(f"{url}/v1/messages", body, is_stream=is_stream)
    if not is_stream:
        names = [block["name"] for block in answer["content"] if block["type"] == "tool_use"]
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        return "".join(names), "".join(texts)
    blocks = [event["content_block"] for event in answer if "content_block" in event]
    deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
    name = "".join(block["name"] for block in blocks if block["type"] == "tool_use")
    return name, "".join(delta.get("text", "") for delta in deltas)


def ask(address: str, body: dict[str, Any], *, is_stream: bool) -> Any:
    whole = {"model": "smollm2", "temperature": 0, "stream": is_stream, **body}
    answered = httpx.post(address, json=whole, timeout=60)
    assert answered.status_code == 200, answered.text
    if not is_stream:
        return answered.json()
    lines = [line for line in answered.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# The choice is read before the engine streams: free, forbidden and forced calls in both ways are
# enough.
@pytest.mark.parametrize(
    ("choice", "is_stream"),
    [
        *((None, False), ("none", False), ("get_time", False)),
        *(("auto", True), ("none", True), ("required", True)),
    ],
)
@pytest.mark.parametrize("api", [chat, respond, message])
def test_a_call_is_free_of_the_format_and_an_answer_has_it(
    url: str, api: Callable[..., Answer], choice: str | None, *, is_stream: bool
) -> None:
    name, text = api(url, choice, asks_weather=True, is_stream=is_stream)
    if choice == "none":
        assert name == ""
        assert json.loads(text).keys() == {"name"}
    else:
        assert name == ("get_time" if choice == "get_time" else "get_weather")
        assert "name" not in text
    if choice in {None, "auto", "none"}:
        name, text = api(url, choice, asks_weather=False, is_stream=is_stream)
        assert name == ""
        assert json.loads(text) == {"name": "Paris"}
