"""Broken tool calls on the real engine, through the real client libraries.

The model `broken` writes `{"city": }`, which the engine answers with an error.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from support.corral_cli import CorralCli
from support.fork_server import ForkServer

from scripts.client_programs import scripted_model

PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
# GOOD_CALL is none of this tool.
OTHER_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "rain", "parameters": {"type": "object"}},
}
BROKEN = '{"city": "Os'

SETTINGS = """
# It writes BROKEN_CALL, or where a grammar forbids that, GOOD_CALL.
[models.broken]
path = "{broken}"
tool_calls = "repair"
[models.broken.flags]
ctx-size = 2048
threads = 1

# Its template takes arguments as objects.
[models.strict]
path = "{tiny}"
[models.strict.flags]
chat-template-file = "{strict_template}"
ctx-size = 2048
parallel = 1
threads = 1

[proxy.ollama]
enabled = true
"""
START = "<|im_start|>assistant\\n"
BROKEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'

GOOD_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    smollm2: Path,
    tiny_model: Path,
) -> Iterator[str]:
    corral = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    template = Path(__file__).with_name("tools.jinja")
    calling = template.read_text("utf-8").replace(START, f"{START}<|say|>")
    lines = [scripted_model.Line("<|say|>", BROKEN_CALL, GOOD_CALL)]
    broken = scripted_model.write(corral.root / "broken.gguf", smollm2, lines, calling, ctx=2048)
    strict_template = template.with_name("qwen2.5.jinja")
    corral.configure(
        SETTINGS.format(broken=broken, tiny=tiny_model, strict_template=strict_template)
    )
    corral.ok("start", "broken", "strict")
    yield corral.url
    corral.end()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **members: Any) -> Any:
    return client.chat.completions.create(
        model="broken",
        messages=[{"role": "user", "content": "Weather in Oslo?"}],
        temperature=0,
        **{"tools": [TOOL], **members},
    )


def test_openai_gets_a_good_call(client: openai.OpenAI) -> None:
    (choice,) = ask(client).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Oslo"},
    )
    assert choice.finish_reason == "tool_calls"
    assert call.id


def test_openai_gets_a_good_call_in_a_stream(client: openai.OpenAI) -> None:
    pieces = [piece.choices[0] for piece in ask(client, stream=True) if piece.choices]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert calls[0].function.name == "weather"
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments) == {"city": "Oslo"}
    assert pieces[-1].finish_reason == "tool_calls"


def test_the_responses_api_gets_a_good_call(client: openai.OpenAI) -> None:
    members: dict[str, Any] = {
        "model": "broken",
        "input": "Weather in Oslo?",
        "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}],
        "temperature": 0,
    }
    with client.responses.stream(**members) as stream:
        streamed = stream.get_final_response()
    responses: list[Any] = [client.responses.create(**members), streamed]
    for response in responses:
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


def test_anthropic_gets_a_good_call(claude: anthropic.Anthropic) -> None:
    for is_stream in (False, True):
        request: Any = {
            "model": "broken",
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "Weather in Oslo?"}],
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        }
        if is_stream:
            with claude.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = claude.messages.create(**request)
        (block,) = (block for block in message.content if block.type == "tool_use")
        assert (block.name, block.input) == ("weather", {"city": "Oslo"})
        assert message.stop_reason == "tool_use"


def test_what_stays_broken_is_an_error_of_the_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, max_tokens=4, tools=[OTHER_TOOL])
    assert raised.value.status_code == 502
    assert raised.value.code == "tool_call_broken"
    assert "limit of tokens" in raised.value.message


def test_a_client_can_have_the_engines_own_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, extra_headers={"X-Corral-Tool-Calls": "pass"})
    assert "tool_call_broken" not in str(raised.value)


def test_the_call_is_generated_from_the_cache(url: str, client: openai.OpenAI) -> None:
    explained = ask(client, extra_headers={"X-Corral-Explain": "1"}).model_extra["corral"]
    assert "generated again" in "".join(finding["sentence"] for finding in explained["findings"])
    metrics = httpx.get(f"{url}/metrics").text
    assert 'corral_broken_tool_calls_total{model="broken",result="regenerated"}' in metrics


def test_a_broken_history_does_not_lock_the_conversation(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Weather in Oslo?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": BROKEN},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "invalid arguments"},
    ]
    cached: list[int] = []
    for _ in range(2):
        answer: Any = client.chat.completions.create(
            model="strict", messages=messages, tools=[TOOL], tool_choice="none", max_tokens=4
        )
        assert answer.choices[0].finish_reason == "length"
        cached.append(answer.timings["cache_n"])
        content = answer.choices[0].message.content
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Go on."},
        ]
    assert cached[1] > cached[0]


def test_a_broken_history_of_responses_is_repaired(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": BROKEN},
        {"type": "function_call_output", "call_id": "a", "output": "invalid arguments"},
    ]
    response = client.responses.create(model="strict", input=items, max_output_tokens=16)
    assert response.output_text


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_ollamas_client_gets_a_good_call(url: str, *, is_stream: bool) -> None:
    request: Any = {
        "model": "broken",
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "tools": [TOOL],
    }
    with closing(ollama.Client(url)) as client:
        if is_stream:
            answers = list(client.chat(**request, stream=True))
        else:
            answers = [client.chat(**request)]
    (call,) = (call for answer in answers for call in answer.message.tool_calls or ())
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
