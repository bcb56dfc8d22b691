"""Ollama's own client, unchanged, against the real engine through all of llama-corral."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel
from support import tiny_clip

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS: Any = {"temperature": 0, "num_predict": 16, "num_ctx": 65_536}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def calling(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


# A small model goes on as others did before it.
HABIT: Any = [
    {"role": "user", "content": "Weather in Rome?"},
    calling("Rome"),
    {"role": "user", "content": "Weather in Oslo?"},
    calling("Oslo"),
    {"role": "user", "content": "Weather in Paris?"},
]


class Colour(BaseModel):
    red: int
    green: int


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with closing(ollama.Client(url)) as client:
        yield client


def test_a_chat_is_answered_with_its_figures(client: ollama.Client) -> None:
    answer = client.chat("smollm2", CAPITAL, options=OPTIONS)
    assert "Paris" in (answer.message.content or "")
    assert (answer.model, answer.done, answer.done_reason) == ("smollm2", True, "stop")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert 0 < (answer.eval_duration or 0) < (answer.total_duration or 0)
    assert datetime.fromisoformat(answer.created_at or "").tzinfo


def test_a_chat_is_streamed_by_default(client: ollama.Client, url: str) -> None:
    parts = list(client.chat("smollm2:latest", CAPITAL, stream=True, options=OPTIONS))
    text = "".join(part.message.content or "" for part in parts)
    assert "Paris" in text
    assert len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].message.content) == ("stop", "")
    assert parts[-1].eval_count
    sent = httpx.post(
        f"{url}/api/chat", json={"model": "smollm2", "messages": CAPITAL, "options": OPTIONS}
    )
    assert sent.headers["Content-Type"] == "application/x-ndjson"
    assert sent.headers["X-Corral-Ignored"] == "num_ctx"
    assert len(sent.text.splitlines()) == len(parts)


def test_an_answer_that_reaches_its_limit_says_so(client: ollama.Client) -> None:
    answer = client.chat("smollm2", CAPITAL, options={"num_predict": 2})
    assert (answer.done_reason, answer.eval_count) == ("length", 2)


def test_a_tool_is_called_and_its_result_answered(client: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 60}
    whole = client.chat("smollm2", HABIT, tools=[WEATHER], options=options)
    (call,) = whole.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    parts = list(client.chat("smollm2", HABIT, tools=[WEATHER], stream=True, options=options))
    streamed = [tool_call for part in parts for tool_call in part.message.tool_calls or ()]
    assert [entry.function for entry in streamed] == [call.function]
    result = {"role": "tool", "tool_name": "get_weather", "content": "It rains."}
    answer = client.chat("smollm2", [*HABIT, whole.message, result], options=options)
    assert answer.message.content


def test_an_answer_has_the_format_that_was_given(client: ollama.Client) -> None:
    prompt = "What is orange in RGB?"
    options = {"temperature": 0, "num_predict": 60}
    chat: Any = [{"role": "user", "content": prompt}]
    schema = Colour.model_json_schema()
    answer = client.chat("smollm2", chat, format=schema, options=options)
    Colour.model_validate_json(answer.message.content or "")
    said = client.generate("smollm2", prompt, format=schema, options=options)
    Colour.model_validate_json(said.response or "")
    raw = client.generate("smollm2", prompt, raw=True, format=schema, options=options)
    Colour.model_validate_json(raw.response or "")


def test_a_picture_is_seen(client: ollama.Client) -> None:
    red = tiny_clip.picture((255, 0, 0)).rpartition(",")[2]
    options = {"num_predict": 2}
    chat: Any = [{"role": "user", "content": "a", "images": [red]}]
    seen = client.chat("seeing", chat, options=options)
    assert (seen.prompt_eval_count or 0) > tiny_clip.TOKENS
    said = client.generate("seeing", "a", images=[red], options=options)
    assert (said.prompt_eval_count or 0) > tiny_clip.TOKENS


def test_a_prompt_is_completed_with_a_system_prompt_and_as_it_is(client: ollama.Client) -> None:
    question = "What is the capital of France?"
    system = "You answer in one sentence."
    said = client.generate("smollm2", question, system=system, options=OPTIONS)
    assert "Paris" in (said.response or "")
    parts = list(client.generate("smollm2", question, system=system, stream=True, options=OPTIONS))
    assert "".join(part.response or "" for part in parts) == said.response
    assert parts[-1].prompt_eval_count == said.prompt_eval_count
    raw = client.generate("smollm2", "The capital of France is", raw=True, options=OPTIONS)
    assert "Paris" in (raw.response or "")
    assert (raw.prompt_eval_count or 99) < (said.prompt_eval_count or 0)
    streamed = client.generate(
        "smollm2", "The capital of France is", raw=True, stream=True, options=OPTIONS
    )
    assert "".join(part.response or "" for part in streamed) == raw.response


def test_options_reach_the_engine(client: ollama.Client) -> None:
    options = {"temperature": 2.0, "seed": 7, "num_predict": 12, "top_k": 50, "stop": ["zzz"]}
    first, again = (client.generate("smollm2", "A poem", options=options) for _ in range(2))
    other = client.generate("smollm2", "A poem", options={**options, "seed": 8})
    assert first.response == again.response != other.response
    stopped = client.generate("smollm2", "a", raw=True, options={**options, "stop": [" "]})
    assert " " not in (stopped.response or "")


def test_texts_become_vectors(client: ollama.Client) -> None:
    found = client.embed("embedder", ["abc", "xyz", "abc"])
    first, second, third = found.embeddings
    assert list(first) == list(third) != list(second)
    assert found.prompt_eval_count
    (alone,) = client.embed("embedder", "abc").embeddings
    assert list(alone) == pytest.approx(list(first), abs=1e-5)
    (cut,) = client.embed("embedder", "abc", dimensions=8).embeddings
    assert len(cut) == 8
    assert sum(value * value for value in cut) == pytest.approx(1)
    old = client.embeddings("embedder", "abc").embedding
    assert list(old) == pytest.approx(list(first), abs=1e-5)


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {
        f"{name}:latest" for name in ("smollm2", "embedder", "resting", "seeing")
    }
    smollm2 = listed["smollm2:latest"]
    assert (smollm2.size or 0) > 80_000_000
    assert smollm2.details
    assert smollm2.details.model_dump() == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }
    shown = client.show("smollm2:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["general.architecture"] == "llama"
    assert (shown.modelinfo or {})["llama.context_length"] == 2048
    assert client.show("seeing").capabilities == ["completion", "vision"]
    assert client.show("embedder").capabilities == ["embedding"]


def test_loaded_models_are_listed_until_they_are_unloaded(client: ollama.Client) -> None:
    loaded = client.generate("resting", keep_alive="10m")
    assert (loaded.done_reason, loaded.response) == ("load", "")
    running = {model.model: model for model in client.ps().models}
    resting, smollm2 = running["resting:latest"], running["smollm2:latest"]
    assert resting.expires_at
    assert smollm2.expires_at
    assert 500 < (resting.expires_at - datetime.now(tz=UTC)).total_seconds() <= 600
    assert (smollm2.expires_at - datetime.now(tz=UTC)).days > 10_000
    assert resting.size
    unloaded = client.chat("resting", [], keep_alive=0)
    assert unloaded.done_reason == "unload"
    while "resting:latest" in {model.model for model in client.ps().models}:
        pass


def test_errors_are_those_of_ollama(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model 'nobody'") as unknown:
        client.chat("nobody", CAPITAL)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="exceeds the available context"):
        list(client.chat("smollm2", [{"role": "user", "content": "a b " * 4000}], stream=True))
    with pytest.raises(ollama.ResponseError, match=r"corral\.toml") as refused:
        client.copy("smollm2", "other")
    assert refused.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="manage_models") as forbidden:
        client.delete("smollm2")
    assert forbidden.value.status_code == 403


def test_what_is_served_is_pulled_already(client: ollama.Client) -> None:
    assert [step.status for step in client.pull("smollm2:latest", stream=True)] == [
        "pulling manifest",
        "success",
    ]
    assert client.pull("smollm2").status == "success"
    with pytest.raises(ollama.ResponseError, match="manage_models"):
        client.pull("llama3.2")


def test_a_server_is_recognised(url: str) -> None:
    assert httpx.get(url).text == "Ollama is running"
    assert httpx.head(url).status_code == 200
    assert httpx.get(f"{url}/api/version").json() == {"version": "0.14.0"}
