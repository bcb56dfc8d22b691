"""An assembled answer equals the engine's own, field by field."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from laws.mended import mended
from support import engine as engines
from support.proxy_harness import ProxyHarness

from supervisor.builds.discover import Engine

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
NATIVE: Final = "/completion"
# Members that differ between two answers to the same request.
PASSING: Final = {"id", "created", "timings", "created_at", "completed_at", "call_id", "id_slot"}

# Says how tools are called, and that text between think marks is reasoning.
TEMPLATE: Final = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if add_generation_prompt and thinks %}{{ '<think>\\n' }}{% endif %}
"""
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}


def said(role: str, content: str | list[Any] | None, **members: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **members}


def called(city: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return [
        said("user", f"weather in {city}"),
        said("assistant", None, tool_calls=[{"id": "a", "type": "function", "function": function}]),
        said("tool", "warm", tool_call_id="a"),
    ]


def responded(city: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"city": city})
    return [
        said("user", f"weather in {city}"),
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
    ]


HELLO: Final = {"messages": [said("user", "Say hello")]}
THINKING: Final[dict[str, Any]] = {
    "grammar": 'root ::= "<think>\\nok so\\n</think>\\n\\nhello"',
    **HELLO,
}
CALLING: Final = {
    "messages": [
        *called("Rome"),
        *called("Oslo"),
        *called("Bern"),
        said("user", "weather in Paris"),
    ],
    "tools": [WEATHER],
    "tool_choice": "required",
}
# The same in the words of Anthropic's and of OpenAI's other page.
USING: Final[dict[str, Any]] = {
    "messages": [
        said("user", "weather in Rome"),
        said(
            "assistant",
            [{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}],
        ),
        said("user", [{"type": "tool_result", "tool_use_id": "a", "content": "warm"}]),
        said("user", "weather in Paris"),
    ],
    "tools": [
        {
            "name": "weather",
            "description": "Tell the weather",
            "input_schema": WEATHER["function"]["parameters"],
        }
    ],
    "tool_choice": {"type": "any"},
}
RESPONDING: Final[dict[str, Any]] = {
    "input": [
        *responded("Rome"),
        *responded("Oslo"),
        *responded("Bern"),
        said("user", "weather in Paris"),
    ],
    "tools": [{"type": "function", **WEATHER["function"]}],
    "tool_choice": "required",
}
WISH: Final[dict[str, Any]] = {"input": "Say hello"}
SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
JSON_OBJECT: Final = {"type": "json_object", "schema": {"type": "object"}}
JSON_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": (CHAT, HELLO),
    "length": (CHAT, {**HELLO, "max_tokens": 3}),
    "stop string": (CHAT, {**HELLO, "grammar": 'root ::= "a b c d e"', "stop": ["c d"]}),
    "empty": (CHAT, {**HELLO, "grammar": 'root ::= "a"', "stop": ["a"]}),
    "several bytes a letter": (CHAT, {**HELLO, "grammar": 'root ::= "aä🦙b"'}),
    "cut in a letter": (CHAT, {**HELLO, "grammar": 'root ::= "aä🦙b"', "max_tokens": 3}),
    "reasoning": (CHAT, THINKING),
    "reasoning cut": (CHAT, {**THINKING, "max_tokens": 10}),
    "reasoning as content": (CHAT, {**THINKING, "reasoning_format": "none"}),
    "tool call": (CHAT, CALLING),
    "tool call cut": (CHAT, {**CALLING, "max_tokens": 22}),
    "json schema": (CHAT, {**HELLO, "response_format": JSON_SCHEMA}),
    "json object": (CHAT, {**HELLO, "response_format": JSON_OBJECT, "max_tokens": 9}),
    "choices": (CHAT, {**HELLO, "n": 2, "max_tokens": 5}),
    "logprobs": (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}),
    "timings": (CHAT, {**HELLO, "timings_per_token": True, "max_tokens": 5}),
    "text": (TEXT, {"prompt": "Once upon a time"}),
    "text to a length": (TEXT, {"prompt": "Once upon a time", "max_tokens": 3}),
    "text to a stop string": (
        TEXT,
        {"prompt": "x", "grammar": 'root ::= "a b c d e"', "stop": ["c d"]},
    ),
    "texts": (TEXT, {"prompt": ["Once upon a time", "Far away"], "max_tokens": 4}),
    "text in choices": (TEXT, {"prompt": "Once upon a time", "n": 2, "max_tokens": 4}),
    "text with logprobs": (TEXT, {"prompt": "Once", "logprobs": 2, "max_tokens": 4}),
    "text with n_probs": (TEXT, {"prompt": "Once", "n_probs": 2, "max_tokens": 4}),
    "message": (MESSAGES, HELLO),
    "message to a length": (MESSAGES, {**HELLO, "max_tokens": 3}),
    "message with a system prompt": (MESSAGES, {**HELLO, "system": "Be short."}),
    "message to a stop string": (MESSAGES, {**HELLO, "stop_sequences": ["e", "a"]}),
    "use of a tool": (MESSAGES, USING),
    "use of a tool cut": (MESSAGES, {**USING, "max_tokens": 22}),
    "message that thinks": (MESSAGES, {**HELLO, "chat_template_kwargs": {"thinks": True}}),
    "response": (RESPONSES, WISH),
    "response to a length": (RESPONSES, {**WISH, "max_output_tokens": 3}),
    "response that thinks": (RESPONSES, {**WISH, "grammar": THINKING["grammar"]}),
    "response with a call": (RESPONSES, RESPONDING),
    "response too long": (RESPONSES, {"input": "word " * 2000}),
    "native": (NATIVE, {"prompt": "Once upon a time", "n_predict": 9}),
    "native to a stop string": (
        NATIVE,
        {"prompt": "x", "grammar": 'root ::= "a b c d e"', "stop": ["c d"]},
    ),
    "native in tokens": (NATIVE, {"prompt": [[1, 2, 3]], "n_predict": 4, "return_tokens": True}),
    "native in tokens to a stop string": (
        NATIVE,
        {
            "prompt": "x",
            "grammar": 'root ::= "a b c d e"',
            "stop": ["c d"],
            "return_tokens": True,
        },
    ),
    "native in tokens, several a letter": (
        NATIVE,
        {"prompt": "x", "grammar": 'root ::= "aä🦙b"', "return_tokens": True},
    ),
    "native fields": (NATIVE, {"prompt": "Once", "response_fields": ["content", "tokens_cached"]}),
    "native too long": (NATIVE, {"prompt": "word " * 2000}),
    "too long": (CHAT, {"messages": [said("user", "word " * 2000)]}),
    "not understood": (CHAT, {"messages": "hello"}),
}


@pytest.fixture(scope="module")
def socket(engine: Engine, smollm2: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        template = Path(directory, "template.jinja")
        template.write_text(TEMPLATE, "utf-8")
        options = ["-c", "2048", "-np", "2", "-t", "1", "--jinja", "--no-kv-unified"]
        with engines.running(
            engine, smollm2, *options, "--chat-template-file", str(template)
        ) as socket:
            yield socket


@pytest.fixture
async def proxy(socket: Path) -> AsyncIterator[ProxyHarness]:
    async with engines.proxied(socket, 2) as proxy:
        yield proxy


@pytest.fixture
async def direct(socket: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        "http://engine",
        connector=aiohttp.UnixConnector(str(socket), force_close=True),
        headers={"Authorization": f"Bearer {engines.KEY}"},
    ) as session:
        yield session


@pytest.mark.parametrize("name", CASES)
async def test_the_whole_answer_is_the_engines_own(
    name: str, proxy: ProxyHarness, direct: aiohttp.ClientSession
) -> None:
    path, members = CASES[name]
    body = {"model": "chat", "max_tokens": 28, "temperature": 0, "cache_prompt": False, **members}
    async with direct.post(path, json=body) as response:
        own = json.loads(mended(path, body, response.status, await response.read()))
    async with proxy.http.post(path, json=body) as response:
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assembled = await response.json()
    assert (own.keys(), stable(own)) == (assembled.keys(), stable(assembled))


async def test_the_samples_match_their_names(direct: aiohttp.ClientSession) -> None:
    messages = {}
    for name in ("tool call", "tool call cut", "reasoning", "reasoning cut"):
        path, members = CASES[name]
        body = {"model": "chat", "max_tokens": 28, "temperature": 0, **members}
        async with direct.post(path, json=body) as response:
            messages[name] = (await response.json())["choices"][0]["message"]
    assert messages["tool call"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
    cut = messages["tool call cut"]["tool_calls"][0]["function"]["arguments"]
    assert cut.startswith('{"city": "')
    assert not cut.endswith("}")
    assert messages["reasoning"]["reasoning_content"] == "ok so\n"
    assert messages["reasoning"]["content"] == "hello"
    assert messages["reasoning cut"]["reasoning_content"]


def stable(answer: Any) -> Any:
    """Return the members of an answer that are the same each time, as clients get them."""
    if isinstance(answer, list):
        return [stable(part) for part in answer]
    if not isinstance(answer, dict):
        return answer
    kept = {name: stable(part) for name, part in answer.items() if name not in PASSING}
    if "n_ctx" in kept or kept.get("type") == "invalid_request_error":
        kept |= {"code": None, "param": None}  # ours to say: `ApiFormat.engine_error`
    return with_cached_input(kept)


def with_cached_input(usage: dict[str, Any]) -> dict[str, Any]:
    """Count cached input as input: `/v1/messages` ignores `cache_prompt`, so the slot decides."""
    cached = usage.pop("cache_read_input_tokens", 0)
    return {**usage, "input_tokens": usage["input_tokens"] + cached} if cached else usage


STREAMS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (CHAT, HELLO),
    "chat with usage": (CHAT, {**HELLO, "stream_options": {"include_usage": True}}),
    "choices": (CHAT, {**HELLO, "n": 2}),
    "tool call": (CHAT, CALLING),
    "text": (TEXT, {"prompt": "Once upon a time"}),
    "texts": (TEXT, {"prompt": ["Once upon a time", "Far away"]}),
    "native": ("/completion", {"prompt": "Once upon a time"}),
    "messages": ("/v1/messages", HELLO),
    "responses": ("/v1/responses", {"input": "Say hello", "max_output_tokens": 8}),
    "own progress": (CHAT, {**HELLO, "return_progress": True}),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_the_engines_own_without_unrequested_progress(
    name: str, proxy: ProxyHarness, direct: aiohttp.ClientSession
) -> None:
    path, members = STREAMS[name]
    shared = {"model": "chat", "max_tokens": 8, "temperature": 0, "cache_prompt": False}
    body = {**shared, "stream": True, **members}
    async with direct.post(path, json=body) as response:
        own = events(mended(path, body, response.status, await response.read()))
    async with proxy.http.post(path, json=body) as response:
        passed = events(await response.read())
    assert passed == own


def events(stream: bytes) -> list[Any]:
    """Return the events, in an order that does not depend on which choice comes first.

    Several prompts at once begin with the event `null`, which says nothing and may be left out.
    """
    lines = stream.splitlines()
    said = [line for line in lines if line.strip(b":") and line != b"data: null"]
    lines = [line.removeprefix(b"data: ") for line in said]
    parts = [json.loads(line) if line[:1] in b"{n" else line.decode() for line in lines]
    return sorted(json.dumps(without_names(part), sort_keys=True) for part in parts)


def without_names(part: Any) -> Any:
    """Return a part without the members that differ in each answer."""
    if isinstance(part, list):
        return [without_names(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    gone = PASSING | {"item_id", "created_at", "time_ms", "id_slot", "return_progress"}
    kept = {name: without_names(entry) for name, entry in part.items() if name not in gone}
    return with_cached_input(kept)
