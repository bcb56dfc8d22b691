"""Features of the Responses API in openai-python; `OPENAI_BASE_URL` names the server."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic

from scripts.sdk_checks.outcome import reported

client = openai.OpenAI(max_retries=0)
COLD: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 60}
CAPITAL = "What is the capital of France?"
CITY: Any = {"type": "string", "enum": ["Paris"]}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}


class City(pydantic.BaseModel):
    name: str


class Weather(pydantic.BaseModel):
    sky: Literal["cold", "warm"]


def whole() -> None:
    assert "Paris" in client.responses.create(input=CAPITAL, **COLD).output_text


def stream() -> None:
    with client.responses.stream(input=CAPITAL, **COLD) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == events.get_final_response().output_text != ""


def parse() -> None:
    assert client.responses.parse(input=CAPITAL, text_format=City, **COLD).output_parsed


def tools() -> None:
    asked: Any = [{"role": "user", "content": "Weather in Paris?"}]
    with client.responses.stream(
        input=asked, tools=[TOOL], tool_choice="required", **COLD
    ) as events:
        *_, call = events.get_final_response().output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    more: Any = [*asked, call, result]
    answer = client.responses.create(input=more, tools=[TOOL], **COLD)
    assert answer.output_text == "It is warm in Paris."


def combined() -> None:
    """With tools and a format, the model calls the tool, then answers in the format."""
    asked: Any = [{"role": "user", "content": "Weather in Paris?"}]
    options: Any = {"tools": [TOOL], "text_format": Weather, **COLD}
    (call,) = client.responses.parse(input=asked, **options).output
    assert call.type == "function_call"
    with client.responses.stream(input=asked, **options) as events:
        (streamed,) = events.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    more: Any = [*asked, call, result]
    assert client.responses.parse(input=more, **options).output_parsed == Weather(sky="warm")
    with client.responses.stream(input=more, **options) as events:
        assert events.get_final_response().output_parsed == Weather(sky="warm")


def turns() -> None:
    first = client.responses.create(input=CAPITAL, store=False, **COLD)
    more: Any = [
        {"role": "user", "content": CAPITAL},
        *first.output,
        {"role": "user", "content": "And of Spain?"},
    ]
    assert client.responses.create(input=more, store=False, **COLD).output_text


def stored() -> None:
    first = client.responses.create(input=CAPITAL, **COLD)
    second = client.responses.create(input="And of Spain?", previous_response_id=first.id, **COLD)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)


for check in (whole, stream, parse, tools, combined, turns, stored):
    with reported(check.__name__):
        check()
