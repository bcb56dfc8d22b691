"""Tools and a format: the requests to the instance, and the response to the client."""

from typing import Any

import orjson
import pytest
from support import response_streams
from support.proxy_harness import ProxyHarness
from support.upstream import Call

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
BOTH: dict[str, Any] = {"tools": [TOOL], "response_format": FORMAT}
CALL = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
TIMINGS = {"cache_n": 0, "prompt_n": 5, "prompt_ms": 1.0, "predicted_n": 3, "predicted_ms": 1.0}


def event(delta: dict[str, Any], reason: str | None = None, **members: Any) -> bytes:
    choice = {"index": 0, "finish_reason": reason, "delta": delta}
    return b"data: " + orjson.dumps({"choices": [choice], **members}) + b"\n\n"


def stream(*deltas: dict[str, Any]) -> bytes:
    events = [event(delta) for delta in deltas]
    return b"".join((*events, event({}, "stop", timings=TIMINGS), b"data: [DONE]\n\n"))


class Engine:
    """Answers a request with a format with JSON, any other one with the given deltas."""

    def __init__(self, *free: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._free = stream(*free)

    async def __call__(self, call: Call) -> None:
        members = orjson.loads(call.body)
        self.asked.append(members)
        has_format = "response_format" in members
        await call.begin_stream()
        await call.chunk(stream({"content": "{}"}) if has_format else self._free)
        await call.end()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_the_model_chooses_is_the_answer(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    engine = Engine({"role": "assistant", "content": None}, {"content": "I look."}, CALL)
    await proxy.fake(engine)
    async with proxy.ask(stream=is_stream, **BOTH) as response:
        body = await response.read()
    assert b"tool_calls" in body
    assert b"I look." in body
    assert [asked.get("response_format") for asked in engine.asked] == [None]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("text", ["It is warm.", '\n{"a":', "``", '```json\n{"a"'])
async def test_an_answer_is_requested_once_more_with_the_format(
    proxy: ProxyHarness, text: str, *, is_stream: bool
) -> None:
    engine = Engine(*({"content": letter} for letter in text))
    await proxy.fake(engine)
    async with proxy.ask(stream=is_stream, **BOTH) as response:
        body = await response.read()
    assert text.encode() not in body
    assert b"{}" in body
    assert [asked.get("response_format") for asked in engine.asked] == [None, FORMAT]
    assert engine.asked[1]["tool_choice"] == "none"


async def test_an_answer_of_the_responses_api_is_requested_once_more(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        text = "{}" if b"response_format" in call.body else "It is warm."
        item = response_streams.text_item(text)
        await call.begin_stream()
        for written in (*response_streams.opened(), response_streams.closed(item)):
            await call.chunk(written)
        await call.end()

    await proxy.fake(speak)
    body = {"input": "hello", "stream": True, **BOTH}
    async with proxy.http.post("/v1/responses", json=body) as response:
        text = await response.text()
    assert "response.completed" in text
    assert '"text":"{}"' in text
    assert "warm" not in text


async def test_the_first_response_is_left_once_its_text_is_json(proxy: ProxyHarness) -> None:
    engine = Engine()

    async def speak(call: Call) -> None:
        if b"response_format" in call.body:
            await engine(call)
            return
        await call.begin_stream()
        await call.chunk(event({"content": '{"a'}))
        await call.until_left()

    await proxy.fake(speak)
    async with proxy.ask(stream=True, **BOTH) as response:
        assert b"{}" in await response.read()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_call_that_is_required_has_no_format(proxy: ProxyHarness, choice: object) -> None:
    engine = Engine(CALL)
    await proxy.fake(engine)
    async with proxy.ask(tool_choice=choice, json_schema={}, **BOTH) as response:
        assert b"tool_calls" in await response.read()
    (asked,) = engine.asked
    assert asked["tool_choice"] == "required"
    assert not asked.keys() & {"response_format", "json_schema"}


@pytest.mark.parametrize(
    "members",
    [
        {**BOTH, "tool_choice": "none"},
        {**BOTH, "tools": []},
        {**BOTH, "response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"response_format": FORMAT},
    ],
)
async def test_a_request_with_one_of_them_is_sent_once(
    proxy: ProxyHarness, members: dict[str, Any]
) -> None:
    engine = Engine({"content": "a"})
    await proxy.fake(engine)
    async with proxy.ask(**members) as response:
        await response.read()
    (asked,) = engine.asked
    assert {name: asked[name] for name in members} == members


async def test_tokens_that_were_generated_twice_are_counted_twice(proxy: ProxyHarness) -> None:
    await proxy.fake(Engine({"content": "warm"}))
    async with proxy.ask(**BOTH) as response:
        await response.read()
    (finished,) = proxy.events("request.finished")
    assert (finished["decoded_tokens"], finished["prompt_tokens"]) == (6, 5)


async def test_a_refusal_is_passed_on(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        error = {"error": {"code": 400, "message": "bad tool", "type": "invalid_request_error"}}
        body = orjson.dumps(error)
        await call.head(
            "Content-Type: application/json", f"Content-Length: {len(body)}", status="400 Bad"
        )
        await call.send(body)

    await proxy.fake(speak)
    async with proxy.ask(**BOTH) as response:
        assert response.status == 400
        assert "bad tool" in await response.text()
