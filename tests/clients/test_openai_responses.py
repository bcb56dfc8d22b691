"""OpenAI's own client and its helpers for the Responses API, against the real engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from support.openai_events import check_response, check_stream, parsed

CAPITAL = "What is the capital of France?"
COLD: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 60}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL: Any = {**COLD, "tools": [WEATHER], "tool_choice": "required"}


def calling(city: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"city": city})
    call = {"type": "function_call", "call_id": city, "name": "get_weather"}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {**call, "arguments": arguments},
        {"type": "function_call_output", "call_id": city, "output": "warm"},
    ]


# A small model goes on as others did before it.
HABIT: Any = [*calling("Rome"), *calling("Oslo"), {"role": "user", "content": "Weather in Paris?"}]


class City(pydantic.BaseModel):
    name: str


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_is_returned(client: openai.OpenAI) -> None:
    response = client.responses.create(input=CAPITAL, **COLD)
    check_response(response.model_dump(mode="json"))
    assert "Paris" in response.output_text
    assert (response.status, response.model) == ("completed", "smollm2")


def test_a_response_is_streamed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(input=CAPITAL, stream=True, **COLD))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert "Paris" in text
    assert events[-1].type == "response.completed"


def test_the_helper_for_streams_adds_up_the_text(client: openai.OpenAI) -> None:
    with client.responses.stream(input=CAPITAL, **COLD) as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        response = stream.get_final_response()
    assert len(snapshots) > 1
    assert snapshots[-1] == response.output_text
    assert "Paris" in response.output_text


def test_the_helper_for_streams_adds_up_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(input=HABIT, **CALL) as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        response = stream.get_final_response()
    (call,) = response.output
    assert call.type == "function_call"
    assert snapshots[-1] == call.arguments == '{"city": "Paris"}'


@pytest.mark.parametrize(
    "members",
    [
        {"input": CAPITAL},
        {"input": HABIT, "tools": [WEATHER], "tool_choice": "required"},
        {"input": CAPITAL, "grammar": 'root ::= "a🦙b"'},
        {"input": CAPITAL, "max_output_tokens": 1, "grammar": 'root ::= "🦙"'},
        {"input": CAPITAL, "tools": [WEATHER], "instructions": "Be short.", "metadata": {"a": "b"}},
    ],
)
def test_each_event_and_response_matches_its_type(url: str, members: dict[str, Any]) -> None:
    whole = httpx.post(f"{url}/v1/responses", json={**COLD, **members}).json()
    check_response(whole)
    stream = httpx.post(f"{url}/v1/responses", json={**COLD, **members, "stream": True}).read()
    events = parsed(stream)
    check_stream(events)
    assert events[-1]["response"].keys() == whole.keys()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_is_parsed(client: openai.OpenAI, *, is_stream: bool) -> None:
    if is_stream:
        with client.responses.stream(input=CAPITAL, text_format=City, **COLD) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.parse(input=CAPITAL, text_format=City, **COLD)
    assert isinstance(response.output_parsed, City)


def test_tools_are_called_over_several_turns(client: openai.OpenAI) -> None:
    first = client.responses.create(input=HABIT, store=False, **CALL)
    (call,) = first.output
    assert call.type == "function_call"
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    items: Any = [*HABIT, *first.output, answer]
    second = client.responses.create(input=items, tools=[WEATHER], **COLD)
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_conversation_is_stored(client: openai.OpenAI) -> None:
    """Its second turn computes only the new tokens."""
    first = client.responses.create(input=CAPITAL, **COLD)
    assert first.usage
    second = client.responses.create(
        input="And of Spain?", previous_response_id=first.id, stream=False, **COLD
    )
    assert second.previous_response_id == first.id
    assert second.usage
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    repeated: Any = [
        {"role": "user", "content": CAPITAL},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Spain?"},
    ]
    itself: Any = client.responses.create(input=repeated, store=False, **COLD)
    assert itself.output_text == second.output_text
    assert itself.usage.input_tokens == second.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as failure:
        client.responses.create(input="on", previous_response_id=second.id, **COLD)
    assert failure.value.code == "previous_response_not_found"
    assert failure.value.param == "previous_response_id"


def test_the_input_items_of_a_stored_conversation_are_listed(client: openai.OpenAI) -> None:
    first = client.responses.create(input=CAPITAL, **COLD)
    last = {"role": "user", "content": "And of Spain?", "id": None, "status": None}
    asked: Any = [*calling("Rome"), last]
    second = client.responses.create(input=asked, previous_response_id=first.id, **COLD)
    listed: Any = client.responses.input_items.list
    items = list(listed(second.id, order="asc", limit=2))  # the client asks for all pages
    types = ("message", "message", "message", "function_call", "function_call_output", "message")
    assert tuple(item.type for item in items) == types
    assert items[0].content[0].text == CAPITAL
    assert items[1].id == first.output[0].id
    assert len({item.id for item in items}) == len(items)
    page = listed(second.id, after=items[-1].id)
    assert [item.id for item in page.data] == [item.id for item in items[-2::-1]]
    assert not page.has_more
    with pytest.raises(openai.BadRequestError):
        listed(second.id, after="x")
    with pytest.raises(openai.BadRequestError):
        listed(second.id, limit=101)
    with pytest.raises(openai.NotFoundError):
        listed("resp_9")


def test_the_tokens_of_a_stored_conversation_are_counted(client: openai.OpenAI) -> None:
    first = client.responses.create(input=CAPITAL, **COLD)
    count = client.responses.input_tokens.count
    more = count(model="smollm2", input="And of Spain?", previous_response_id=first.id)
    less = count(model="smollm2", input="And of Spain?")
    assert first.usage
    assert more.input_tokens > first.usage.input_tokens > less.input_tokens > 0


def test_a_streamed_response_is_stored(client: openai.OpenAI) -> None:
    with client.responses.stream(input=CAPITAL, **COLD) as stream:
        first = stream.get_final_response()
    with client.responses.stream(
        input="And of Spain?", previous_response_id=first.id, **COLD
    ) as stream:
        second = stream.get_final_response()
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_a_prompt_beyond_the_context_is_rejected(client: openai.OpenAI) -> None:
    with (
        pytest.raises(openai.BadRequestError, match="exceeds the available context size"),
        client.responses.stream(input="word " * 5000, **COLD),
    ):
        pass
