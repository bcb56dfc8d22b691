"""OpenAI's own client, unchanged, against the real engine through all of llama-corral."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]


def calling(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
    call = {"id": f"call-{city}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


# A small model goes on as others did before it.
HABIT: Any = [
    {"role": "user", "content": "Weather in Rome?"},
    calling("Rome"),
    {"role": "user", "content": "Weather in Oslo?"},
    calling("Oslo"),
    {"role": "user", "content": "Weather in Paris?"},
]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, max_tokens=16, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens > answer.usage.completion_tokens > 0


def test_a_chat_is_streamed_and_its_usage_comes_last(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="gpt-4o-mini",
        messages=CAPITAL,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 0


def test_several_choices_are_returned(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=CAPITAL, max_tokens=2, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_a_response_follows_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=CAPITAL,
        max_tokens=40,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": WEATHER["parameters"]},
        },
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_logprobs_are_returned(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert [len(token.top_logprobs) for token in logprobs.content or ()] == [2, 2]


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=HABIT, tools=TOOLS, max_tokens=60, temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


def test_a_tool_call_is_streamed_in_pieces(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2", messages=HABIT, tools=TOOLS, max_tokens=60, temperature=0
    ) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        whole = stream.get_final_completion()
    calls = whole.choices[0].message.tool_calls
    assert calls
    (call,) = calls
    assert len(pieces) > 1
    assert "".join(pieces) == call.function.arguments == '{"city": "Paris"}'


def test_a_text_is_completed_at_once_or_streamed(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=6, temperature=0)
    stream = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=6, temperature=0, stream=True
    )
    assert "Paris" in answer.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_texts_are_embedded(client: openai.OpenAI) -> None:
    # The client asks for base64 and turns it into numbers.
    answer = client.embeddings.create(model="embedder", input=["abc", "def"])
    assert [len(entry.embedding) for entry in answer.data] == [64, 64]
    assert answer.data[0].embedding != answer.data[1].embedding


def test_the_models_are_listed_and_found_by_every_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [
        "smollm2",
        "embedder",
        "resting",
        "seeing",
    ]
    for name in ("smollm2", "gpt-4o-mini"):
        assert client.models.retrieve(name).id == "smollm2"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean smollm2") as failure:
        client.chat.completions.create(model="smollm3", messages=CAPITAL)
    assert failure.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_rejected_by_the_engine(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "word " * 3000}], max_tokens=2
        )
