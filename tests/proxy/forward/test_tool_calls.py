"""Broken tool calls: the client's response, and the requests to the instance."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from support import response_streams
from support.proxy_harness import ProxyHarness
from support.upstream import Call as Asked

from proxy.forward import response as response_module
from proxy.observe.cache_finding import Cause
from proxy.observe.explanation import explain

REPAIR = {"X-Corral-Tool-Calls": "repair"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
GOOD = '{"city": "Rome"}'
# The text of a model, and the call that a client gets without a second generation.
REPAIRED = {
    "{'city': 'Rome', 'days': 3,}": {"city": "Rome", "days": 3},
    '{"city": "Rome"': {"city": "Rome"},
    '{"city": "Rome", "days": "3"}': {"city": "Rome", "days": 3},
    '{city: "Rome"}': {"city": "Rome"},
}
# Calls that are not repaired: the result would differ from the model's intention.
BROKEN = ['{"city": "Ro', '{"town": "Rome"}', '{"city": 5}', "[]", "Rome", '{"city": "Rome", "d"']


def chat_stream(*arguments: str, reason: str = "tool_calls", text: str = "") -> list[bytes]:
    """Return the events of an answer; each call arrives in two pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    deltas += [{"content": text}] if text else []
    for at, given in enumerate(arguments):
        half = len(given) // 2
        begun: dict[str, Any] = {"index": at, "id": f"call_{at}", "type": "function"}
        function = {"name": "weather", "arguments": given[:half]}
        deltas.append({"tool_calls": [{**begun, "function": function}]})
        rest = {"index": at, "function": {"arguments": given[half:]}}
        deltas.append({"tool_calls": [rest]})
    choices: list[dict[str, Any]] = [
        {"index": 0, "finish_reason": None, "delta": delta} for delta in deltas
    ]
    choices.append({"index": 0, "finish_reason": reason, "delta": {}})
    shared = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "chat"}
    pieces = [{**shared, "choices": [choice]} for choice in choices]
    return [*(b"data: " + orjson.dumps(piece) + b"\n\n" for piece in pieces), b"data: [DONE]\n\n"]


ERROR = {"code": 500, "message": "The model produced output that does not match the expected x"}


class Engine:
    """Answers with a stream; a request for a call alone with the next of `again`."""

    def __init__(self, events: Sequence[bytes], *again: str) -> None:
        self.asked: list[dict[str, Any]] = []
        self._events = events
        self._again = list(again)

    async def __call__(self, asked: Asked) -> None:
        members = orjson.loads(asked.body)
        self.asked.append(members)
        is_again = "response_format" in members
        text = self._again.pop(0) if is_again else ""
        await asked.begin_stream()
        for event in again_stream(asked.line, text) if is_again else self._events:
            await asked.chunk(event)
        await asked.end()


ASKED = {
    "model": "chat",
    "input": "Rome?",
    "tools": [{"type": "function", **FUNCTION}],
    "stream": True,
}


def again_stream(line: str, text: str) -> list[bytes]:
    if "responses" in line:
        item = response_streams.text_item(text)
        return [
            *response_streams.opened(),
            *response_streams.text_events(text),
            response_streams.closed(item),
        ]
    return chat_stream(text=text, reason="stop")


def written(arguments: object) -> str:
    return json.dumps({"name": "weather", "arguments": arguments})


async def ask(
    proxy: ProxyHarness, *, is_stream: bool, headers: dict[str, str] = REPAIR, **members: Any
) -> tuple[list[Any], str, str]:
    """Return the arguments of the calls that a client reads, the text and the reason."""
    messages = [{"role": "user", "content": "Rome?"}]
    asked = {"model": "chat", "messages": messages, "tools": TOOLS, "stream": is_stream}
    body = {**asked, **members}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=headers) as response:
        answered = await response.read()
        assert response.status == 200, answered
    if not is_stream:
        (choice,) = orjson.loads(answered)["choices"]
        calls = choice["message"].get("tool_calls") or []
        arguments = [call["function"]["arguments"] for call in calls]
        return arguments, choice["message"]["content"] or "", choice["finish_reason"]
    assert answered.endswith(b"data: [DONE]\n\n")
    lines = [line[6:] for line in answered.splitlines() if line.startswith(b"data: {")]
    (*_, reason), deltas = zip(
        *((part["finish_reason"], part["delta"]) for line in lines for part in _choices(line)),
        strict=True,
    )
    pieces: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        at = call["index"]
        assert at in pieces or (call["id"] and call["function"]["name"])
        pieces[at] = pieces.get(at, "") + call["function"].get("arguments", "")
    text = "".join(delta.get("content") or "" for delta in deltas)
    return list(pieces.values()), text, reason


def _choices(line: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(line)["choices"]
    return found


both = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])


@both
@pytest.mark.parametrize("text", REPAIRED)
async def test_wrong_punctuation_and_quoted_numbers_are_repaired(
    proxy: ProxyHarness, text: str, *, is_stream: bool
) -> None:
    engine = Engine(chat_stream(text, text="I look."))
    await proxy.fake(engine)
    calls, said, reason = await ask(proxy, is_stream=is_stream)
    assert list(map(orjson.loads, calls)) == [REPAIRED[text]]
    assert (said, reason) == ("I look.", "tool_calls")
    assert len(engine.asked) == 1
    (finished,) = proxy.events("request.finished")
    assert finished["tool_calls"] == {"repaired": 1}


async def test_a_misspelled_header_is_refused(proxy: ProxyHarness) -> None:
    engine = Engine(chat_stream(GOOD))
    await proxy.fake(engine)
    body = {"model": "chat", "messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS}
    headers = {"X-Corral-Tool-Calls": "repiar"}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 400
        assert "'repiar'; it may be `repair` or `pass`" in await response.text()
    assert engine.asked == []


@both
@pytest.mark.parametrize("text", BROKEN)
async def test_a_broken_call_alone_is_generated_again(
    proxy: ProxyHarness, text: str, *, is_stream: bool
) -> None:
    engine = Engine(chat_stream(GOOD, text, text="I look."), written({"city": "Oslo"}))
    await proxy.fake(engine)
    calls, said, reason = await ask(proxy, is_stream=is_stream)
    assert list(map(orjson.loads, calls)) == [{"city": "Rome"}, {"city": "Oslo"}]
    assert (said, reason) == ("I look.", "tool_calls")
    first, second = engine.asked
    assert second["messages"] == first["messages"]
    assert second["tools"] == first["tools"]
    described = second["response_format"]["json_schema"]["schema"]["properties"]
    assert described == {"name": {"const": "weather"}, "arguments": PARAMETERS}
    (finished,) = proxy.events("request.finished")
    assert finished["tool_calls"] == {"regenerated": 1}
    assert finished["status"] == 200


@both
@pytest.mark.parametrize("is_parsed", [True, False])
async def test_usage_counts_the_prompt_once_and_all_generated_tokens(
    proxy: ProxyHarness, *, is_stream: bool, is_parsed: bool
) -> None:
    """The engine does not count calls that it could not parse."""

    async def speak(asked: Asked) -> None:
        await asked.begin_stream()
        is_again = "response_format" in orjson.loads(asked.body)
        *events, end = again_stream("", written({"city": "Oslo"})) if is_again else chat_stream("{")
        counts = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
        events.append(b"data: " + orjson.dumps({"choices": [], "usage": counts}) + b"\n\n")
        if not (is_again or is_parsed):
            events, end = [b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"], b""
        for event in (*events, end):
            if event:
                await asked.chunk(event)
        await asked.end()

    await proxy.fake(speak)
    body = {"tools": TOOLS, "stream": is_stream, "messages": [], "model": "chat"}
    body["stream_options"] = {"include_usage": True}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        text = await response.text()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    (usage,) = (
        found for line in lines or [text] if (found := json.loads(line).get("usage")) is not None
    )
    tokens = 10 if is_parsed else 5
    assert usage == {
        "prompt_tokens": 20,
        "completion_tokens": tokens,
        "total_tokens": 20 + tokens,
    }


@both
async def test_each_of_several_answers_is_checked(proxy: ProxyHarness, *, is_stream: bool) -> None:
    again = written({"city": "Oslo"})
    engine = Engine(chat_stream('{"city": 5}'), again, again)
    await proxy.fake(engine)
    body = {"tools": TOOLS, "stream": is_stream, "messages": [], "model": "chat", "n": 2}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        text = await response.text()
    assert (text.count("Oslo"), text.count("5}")) == (2, 0)
    assert len(engine.asked) == 4


async def test_a_stream_has_pings_while_a_call_is_generated_again(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_module, "FIRST_PING_S", 0.01)
    has_text, has_ping = asyncio.Event(), asyncio.Event()

    async def speak(asked: Asked) -> None:
        await asked.begin_stream()
        if "response_format" in orjson.loads(asked.body):
            await has_ping.wait()
            events = again_stream("", written({"city": "Oslo"}))
        else:
            begun, events = chat_stream(text="I look.")[:2], chat_stream("{")
            await asked.chunk(b"".join(begun))
            await has_text.wait()
        for event in events:
            await asked.chunk(event)
        await asked.end()

    await proxy.fake(speak)
    body = {"tools": TOOLS, "stream": True, "messages": [], "model": "chat"}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        await response.content.readuntil(b"I look.")
        has_text.set()
        await response.content.readuntil(b"\n:\n\n")
        has_ping.set()
        assert b"Oslo" in await response.content.read()


@both
async def test_a_call_that_a_limit_cut_is_never_completed(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    engine = Engine(chat_stream('{"city": "Rome"', reason="length"), written({"city": "Romeo"}))
    await proxy.fake(engine)
    calls, _, reason = await ask(proxy, is_stream=is_stream)
    assert list(map(orjson.loads, calls)) == [{"city": "Romeo"}]
    assert reason == "tool_calls"


@both
async def test_a_call_that_stays_broken_is_an_error_that_names_it(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    engine = Engine(chat_stream('{"city": 5}'), "{", written({"city": 6}))
    await proxy.fake(engine)
    body = {"tools": TOOLS, "stream": is_stream, "messages": [], "model": "chat"}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (502, "tool_call_broken")
        assert response.headers["X-Should-Retry"] == "false"
    assert "weather" in error["message"]
    assert "city: the value is not of type" in error["message"]
    assert engine.asked[2]["temperature"] > 0
    (finished,) = proxy.events("request.finished")
    assert finished["tool_calls"] == {"failed": 1}
    causes = [finding.cause for finding in explain(finished).findings]
    assert causes[:2] == [Cause.ERROR, Cause.BROKEN_TOOL_CALL]


async def test_a_stream_with_text_ends_in_an_error_event(proxy: ProxyHarness) -> None:
    events, has_text = chat_stream("{", text="I look."), asyncio.Event()

    async def speak(asked: Asked) -> None:
        await asked.begin_stream()
        if b"response_format" in asked.body:
            await asked.chunk(b"".join(chat_stream(text="{", reason="stop")))
        else:
            await asked.chunk(b"".join(events[:2]))
            await has_text.wait()
            await asked.chunk(b"".join(events[2:]))
        await asked.end()

    await proxy.fake(speak)
    body = {"tools": TOOLS, "stream": True, "messages": [], "model": "chat"}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        assert response.status == 200
        assert b"I look." in await response.content.readuntil(b"I look.")
        has_text.set()
        rest = await response.content.readuntil(b"tool_call_broken")
    assert b"[DONE]" not in rest


@both
async def test_an_answer_that_the_engine_cannot_parse_is_generated_again(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    error = b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"
    engine = Engine([chat_stream()[0], error], written({"city": "Oslo"}))
    await proxy.fake(engine)
    calls, _, reason = await ask(proxy, is_stream=is_stream)
    assert list(map(orjson.loads, calls)) == [{"city": "Oslo"}]
    assert reason == "tool_calls"
    choices = engine.asked[1]["response_format"]["json_schema"]["schema"]["anyOf"]
    assert [list(choice["properties"]) for choice in choices] == [["name", "arguments"], ["answer"]]


@both
async def test_where_it_could_not_parse_the_answer_may_be_a_text(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    error = b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"
    await proxy.fake(Engine([chat_stream()[0], error], json.dumps({"answer": "It is warm."})))
    assert await ask(proxy, is_stream=is_stream) == ([], "It is warm.", "stop")


async def test_a_call_that_ends_in_an_error_keeps_its_tool(proxy: ProxyHarness) -> None:
    error = b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"
    engine = Engine([*chat_stream("{{")[:3], error], written({"city": "Oslo"}))
    await proxy.fake(engine)
    calls, _, reason = await ask(proxy, is_stream=True)
    assert list(map(orjson.loads, calls)) == [{"city": "Oslo"}]
    assert reason == "tool_calls"


@both
async def test_without_the_header_nothing_is_checked(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    events = chat_stream(GOOD, '{"city": "Ro', text="I look.")
    engine = Engine(events)
    await proxy.fake(engine)
    calls, _, _ = await ask(proxy, is_stream=is_stream, headers={})
    assert calls == [GOOD, '{"city": "Ro']
    assert len(engine.asked) == 1
    (finished,) = proxy.events("request.finished")
    assert finished["tool_calls"] is None


@pytest.mark.parametrize("members", [{}, {"tools": TOOLS}])
async def test_good_answers_pass_byte_for_byte(
    proxy: ProxyHarness, members: dict[str, Any]
) -> None:
    events = chat_stream(GOOD, GOOD, text="<tool_call>{'city': 'Rome'}</tool_call>")
    await proxy.fake(Engine(events))
    body = {"messages": [], "model": "chat", "stream": True, **members}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        assert await response.read() == b"".join(events)


async def test_text_flows_while_a_call_is_held(proxy: ProxyHarness) -> None:
    events = chat_stream(GOOD, text="I look.")

    async def speak(asked: Asked) -> None:
        await asked.begin_stream()
        await asked.chunk(b"".join(events[:3]))
        await asked.until_left()

    await proxy.fake(speak)
    body = {"messages": [], "model": "chat", "stream": True, "tools": TOOLS}
    async with proxy.http.post("/v1/chat/completions", json=body, headers=REPAIR) as response:
        first, _ = await anext(response.content.iter_chunks())
    assert b"I look." in first
    assert b"tool_calls" not in first


@both
async def test_the_responses_api_gets_its_own_events(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    item = {**response_streams.call_item("a", "Rome"), "arguments": '{"city": "Ro'}
    events = [
        *response_streams.opened(),
        *response_streams.call_events(item, '{"city": ', '"Ro'),
        response_streams.done(**item),
        response_streams.closed(item),
    ]
    await proxy.fake(Engine(events, written({"city": "Oslo"})))
    tools = [{"type": "function", **FUNCTION}]
    body = {"model": "chat", "input": "Rome?", "tools": tools, "stream": is_stream}
    async with proxy.http.post("/v1/responses", json=body, headers=REPAIR) as response:
        text = await response.text()
        assert response.status == 200, text
    if is_stream:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        answered = [json.loads(line) for line in lines]
        deltas = [event["delta"] for event in answered if event["type"].endswith("arguments.delta")]
        assert json.loads("".join(deltas)) == {"city": "Oslo"}
        (done,) = (event for event in answered if event["type"].endswith("arguments.done"))
        assert json.loads(done["arguments"]) == {"city": "Oslo"}
        whole = answered[-1]["response"]
    else:
        whole = json.loads(text)
    (given,) = whole["output"]
    assert whole["usage"]["output_tokens"] == 14  # of both generations
    assert json.loads(given["arguments"]) == {"city": "Oslo"}
    assert given["call_id"] == "fc_a"


@pytest.mark.parametrize(
    ("answer", "has_begun"),
    [
        (written({"city": "Oslo"}), False),
        (written({"city": "Oslo"}), True),
        ('{"answer": "Rain."}', False),
    ],
)
async def test_the_responses_api_gets_a_call_that_the_engine_could_not_parse(
    proxy: ProxyHarness, answer: str, *, has_begun: bool
) -> None:
    """Reasoning and text before the call have no end of their own from the engine."""
    thought = response_streams.added(content=[], id="rs_1", summary=[], type="reasoning")
    thinks = response_streams.written(
        type="response.reasoning_text.delta", item_id="rs_1", delta="hm"
    )
    item = response_streams.call_item("a", "Rome")
    events = [
        *response_streams.opened(),
        *(thought, thinks),
        *response_streams.text_events("I look.")[:3],
        *(response_streams.call_events(item, '{"city": ') if has_begun else ()),
        b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n",
    ]
    await proxy.fake(Engine(events, answer))
    async with proxy.http.post("/v1/responses", json=ASKED, headers=REPAIR) as response:
        text = await response.text()
        assert response.status == 200, text
    read = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    begun = [event["item"]["type"] for event in read if event["type"].endswith("item.added")]
    ended = [event["item"] for event in read if event["type"].endswith("item.done")]
    assert read[-1]["type"] == "response.completed"
    assert read[-1]["response"]["output"] == ended
    assert read[-1]["response"]["usage"]["output_tokens"] == 7  # the first generation reports none
    reasoned, said, last = ended
    assert reasoned["content"][0]["text"] == "hm"
    assert said["content"][0]["text"] == "I look."
    if "city" in answer:
        assert begun == ["reasoning", "message", "function_call"]
        assert json.loads(last["arguments"]) == {"city": "Oslo"}
        assert (last["name"], bool(last["call_id"])) == ("weather", True)
    else:
        assert begun == ["reasoning", "message", "message"]
        assert last["content"][0]["text"] == "Rain."


async def test_a_whole_response_gets_a_call_that_the_engine_could_not_parse(
    proxy: ProxyHarness,
) -> None:
    events = [*response_streams.opened(), b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n"]
    await proxy.fake(Engine(events, written({"city": "Oslo"})))
    body = {**ASKED, "stream": False}
    async with proxy.http.post("/v1/responses", json=body, headers=REPAIR) as response:
        answered = await response.json()
    (item,) = answered["output"]
    assert (answered["status"], item["name"]) == ("completed", "weather")
    assert json.loads(item["arguments"]) == {"city": "Oslo"}


@both
async def test_anthropics_api_gets_its_own_events(proxy: ProxyHarness, *, is_stream: bool) -> None:
    await proxy.fake(Engine(chat_stream('{"city": "Ro'), written({"city": "Oslo"})))
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    body = {"model": "chat", "max_tokens": 50, "tools": tools, "stream": is_stream}
    body["messages"] = [{"role": "user", "content": "Rome?"}]
    async with proxy.http.post("/v1/messages", json=body, headers=REPAIR) as response:
        text = await response.text()
        assert response.status == 200, text
    if is_stream:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line).get("delta", {}) for line in lines]
        partial = "".join(delta.get("partial_json", "") for delta in deltas)
        assert json.loads(partial) == {"city": "Oslo"}
        assert {"stop_reason": "tool_use", "stop_sequence": None} in deltas
    else:
        (block,) = json.loads(text)["content"]
        assert block["input"] == {"city": "Oslo"}


REFUSAL = {"code": 500, "message": "Failed to parse tool call arguments as JSON: …"}


def history(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]


class Strict:
    """Refuses a history with arguments that are not JSON, as most templates make the engine do."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def __call__(self, asked: Asked) -> None:
        self.asked.append(asked.body)
        messages = orjson.loads(asked.body)["messages"]
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        try:
            for call in calls:
                orjson.loads(call["function"]["arguments"])
        except orjson.JSONDecodeError:
            error = orjson.dumps({"error": REFUSAL})
            length = f"Content-Length: {len(error)}"
            await asked.head("Content-Type: application/json", length, status="500 Error")
            await asked.send(error)
            return
        await asked.begin_stream()
        for event in chat_stream(text="It is warm.", reason="stop"):
            await asked.chunk(event)
        await asked.end()


@both
async def test_a_history_that_the_engine_refuses_is_repaired(
    proxy: ProxyHarness, *, is_stream: bool
) -> None:
    engine = Strict()
    await proxy.fake(engine)
    for _ in range(2):
        messages = history('{"city": "Ro')
        _, said, _ = await ask(proxy, is_stream=is_stream, headers={}, messages=messages)
        assert said == "It is warm."
    first, second, third, fourth = engine.asked
    assert (first, second) == (third, fourth)
    assert orjson.loads(second)["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert proxy.events("request.finished")[1]["tool_calls"] == {"history": 1}


async def test_with_repair_the_engine_is_never_asked_with_a_broken_history(
    proxy: ProxyHarness,
) -> None:
    engine = Strict()
    await proxy.fake(engine)
    await ask(proxy, is_stream=True, messages=history("{'city': 'Rome'}"))
    (asked,) = engine.asked
    function = orjson.loads(asked)["messages"][1]["tool_calls"][0]["function"]
    assert orjson.loads(function["arguments"]) == {"city": "Rome"}


async def test_a_refusal_without_anything_to_repair_is_passed_on(proxy: ProxyHarness) -> None:
    async def refuse(asked: Asked) -> None:
        error = orjson.dumps({"error": REFUSAL})
        length = f"Content-Length: {len(error)}"
        await asked.head("Content-Type: application/json", length, status="500 Error")
        await asked.send(error)

    fake = await proxy.fake(refuse)
    async with proxy.ask(tools=TOOLS) as response:
        assert response.status == 400
    assert fake.calls.qsize() == 1
