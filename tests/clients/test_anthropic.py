"""Anthropic's own client, unchanged, against the real engine through all of llama-corral."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
COLD: Any = {"temperature": 0}  # no parameter of the client any more, still one of the engine
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "the weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


def calling(city: str) -> dict[str, Any]:
    use = {"id": f"call-{city}", "type": "tool_use", "name": "get_weather", "input": {"city": city}}
    return {"role": "assistant", "content": [use]}


# A small model goes on as others did before it.
HABIT: Any = [
    {"role": "user", "content": "Weather in Rome?"},
    calling("Rome"),
    {"role": "user", "content": "Weather in Oslo?"},
    calling("Oslo"),
    {"role": "user", "content": "Weather in Paris?"},
]


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="claude-haiku", max_tokens=16, messages=CAPITAL, extra_body=COLD
    )
    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


def test_a_system_prompt_and_betas_are_accepted(client: anthropic.Anthropic) -> None:
    answer = client.beta.messages.create(
        model="smollm2", max_tokens=2, system="Be short.", messages=CAPITAL, betas=["some-beta"]
    )
    assert answer.stop_reason == "max_tokens"


def test_a_message_is_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="smollm2", max_tokens=16, messages=CAPITAL, extra_body=COLD
    ) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert "Paris" in text
    assert whole.stop_reason == "end_turn"


def test_a_tool_is_used(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="smollm2", max_tokens=60, messages=HABIT, tools=TOOLS, extra_body=COLD
    )
    assert answer.stop_reason == "tool_use"
    use = answer.content[-1]
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})


def test_tool_use_is_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="smollm2", max_tokens=60, messages=HABIT, tools=TOOLS, extra_body=COLD
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        use = stream.get_final_message().content[-1]
    assert len(pieces) > 1
    assert use.type == "tool_use"
    assert use.input == {"city": "Paris"}


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="smollm2", messages=CAPITAL)
    answer = client.messages.create(model="smollm2", max_tokens=1, messages=CAPITAL)
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_models_are_listed_and_found_by_name(client: anthropic.Anthropic) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["smollm2", "embedder", "resting", "seeing"]
    found = client.models.retrieve("claude-haiku")
    assert (found.id, found.type, found.display_name) == ("smollm2", "model", "smollm2")
    assert found.created_at.year >= 2025


def test_an_unknown_model_is_not_found_in_anthropics_format(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="did you mean smollm2") as failure:
        client.messages.create(model="smollm3", max_tokens=2, messages=CAPITAL)
    assert failure.value.type == "not_found_error"


def test_image_input_to_a_text_model_is_a_client_error(
    client: anthropic.Anthropic,
) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    picture: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="image input is not supported"):
        client.messages.create(model="smollm2", max_tokens=2, messages=picture)


def test_a_prompt_beyond_the_context_is_told_as_claude_code_reads_it(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d{4} tokens > 2048 maximum"
    ):
        client.messages.create(
            model="smollm2", max_tokens=2, messages=[{"role": "user", "content": "word " * 3000}]
        )


@pytest.mark.parametrize("messages", [None, [], "hello"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_message_without_messages_is_a_mistake(
    client: anthropic.Anthropic, messages: Any, *, is_stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(
            model="smollm2",
            max_tokens=2,
            messages=[],
            stream=is_stream,
            extra_body={} if messages == [] else {"messages": messages},
        )


def test_messages_that_are_missing_are_a_mistake(url: str) -> None:
    response = httpx.post(f"{url}/v1/messages", json={"model": "smollm2", "max_tokens": 2})
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )


class City(pydantic.BaseModel):
    name: str


FORMAT: Any = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}},
        "required": ["name"],
        "additionalProperties": False,
    },
}


def test_an_answer_has_the_format_that_is_asked_for(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(
        model="smollm2", max_tokens=40, messages=CAPITAL, output_format=City, extra_body=COLD
    )
    assert answer.parsed_output
    assert answer.stop_reason == "end_turn"
    plain = client.messages.create(model="smollm2", max_tokens=2, messages=CAPITAL, extra_body=COLD)
    assert tokens(answer) == tokens(plain)


def test_a_stream_has_the_format_that_is_asked_for(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="smollm2",
        max_tokens=40,
        system="Be short.",
        messages=HABIT,
        output_config={"format": FORMAT},
        extra_body=COLD,
    ) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert json.loads(text).keys() == {"name"}
    plain = client.messages.create(
        model="smollm2", max_tokens=2, system="Be short.", messages=HABIT, extra_body=COLD
    )
    assert tokens(whole) == tokens(plain)


def test_an_error_of_a_formatted_answer_is_anthropics(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{4} tokens > 2048"):
        client.messages.create(
            model="smollm2",
            max_tokens=2,
            messages=[{"role": "user", "content": "word " * 3000}],
            output_config={"format": FORMAT},
        )


def tokens(message: anthropic.types.Message) -> int:
    """Return the length of the prompt: it must not depend on the format."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
