"""A chat whose engine is gone goes on elsewhere: once, whole, and only if it is plain text."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness
from support.requests import ask
from support.upstream import Call, Script

from proxy.errors import Unfinished
from proxy.forward.assemblers import CompletedResponse
from proxy.forward.second_request import continuations
from proxy.observe.record import AccessRecord, Timeline
from proxy.request.request import ProxyRequest
from proxy.router.lease import ProcessExit
from proxy.upstream.endpoint_kinds import EndpointKind

MESSAGES = [{"role": "user", "content": "go"}]


def event(completion: str = "one", finish: str | None = None, **delta: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": completion, "choices": [choice]}).encode() + b"\n\n"


ROLE = event(role="assistant", content=None)
SENT = ROLE + event(content="ab") + event(content="cd")
REST = [
    event("two", role="assistant", content=None),
    event("two", content="abcdef"),
    event("two", content="gh"),
    event("two", finish="stop"),
    b'data: {"id":"two","choices":[],"usage":{"completion_tokens":2,"prompt_tokens":9}}\n\n',
    b"data: [DONE]\n\n",
]


def request(**members: Any) -> Any:
    body = {"messages": MESSAGES, "stream": True, **members}
    slots = members.get("n", 1)
    return replace(ask("go"), kind=EndpointKind.CHAT, json=body, slots=slots)


async def broken(proxy: ProxyHarness, sent: bytes, process_exit: ProcessExit = "killed") -> None:
    """Start an instance, on trial if it crashes, that ends after these bytes."""

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(sent)
        call.drop()
        await asyncio.sleep(0)
        proxy.router.note_end("chat.1", process_exit)
        proxy.router.withdraw("chat.1")

    fake = await proxy.fake(speak, "chat.1", is_admitted=False)
    share = 1.0 if process_exit == "crashed" else 0.0
    proxy.router.admit(replace(fake.upstream(), reports_exit=True, trial_share=share))


def saying(events: list[bytes]) -> Script:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        for event in events:
            await call.chunk(event)
        await call.end()

    return speak


def texts(stream: bytes) -> tuple[list[dict[str, Any]], str]:
    lines = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line]
    assert lines.pop() == "[DONE]"
    found = [json.loads(line) for line in lines]
    deltas = [entry["choices"][0]["delta"] for entry in found if entry["choices"]]
    return found, "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("process_exit", ["killed", "crashed"])
async def test_the_client_gets_the_rest_in_the_same_stream(
    proxy: ProxyHarness, process_exit: ProcessExit
) -> None:
    await broken(proxy, SENT, process_exit)
    other = await proxy.fake(saying(REST), "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES, max_tokens=6) as response:
        found, text = texts(await response.read())
    assert text == "abcdefgh"
    assert {entry["id"] for entry in found} == {"one"}
    assert sum("role" in entry["choices"][0]["delta"] for entry in found if entry["choices"]) == 1
    assert found[-1]["usage"] == {"completion_tokens": 4, "prompt_tokens": 7}
    asked = json.loads((await other.calls.get()).body)
    assert asked["messages"] == [*MESSAGES, {"role": "assistant", "content": "abcd"}]
    assert asked["max_tokens"] == 4
    (finished,) = proxy.events("request.finished")
    assert [finished[name] for name in ("status", "attempts", "continued")] == [200, 2, 1]


@pytest.mark.parametrize("tokens", [["abcdef", "gh"], ["a", "bc", "d", "efgh"], ["abcd", "efgh"]])
async def test_a_seeded_one_is_asked_for_again_and_sent_from_where_it_broke_off(
    proxy: ProxyHarness, tokens: list[str]
) -> None:
    await broken(proxy, SENT)
    again = [event("two", content=token) for token in tokens]
    other = await proxy.fake(saying([*REST[:1], *again, *REST[3:]]), "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES, max_tokens=6, seed=7) as response:
        found, text = texts(await response.read())
    assert text == "abcdefgh"
    assert found[-1]["usage"] == {"completion_tokens": 2, "prompt_tokens": 9}
    asked = json.loads((await other.calls.get()).body)
    assert (asked["messages"], asked["max_tokens"]) == (MESSAGES, 6)


async def test_a_seeded_answer_that_begins_otherwise_is_continued_from_its_text(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        is_replay = b"assistant" not in call.body
        events = [*REST[:1], event("two", content="xyz"), *REST[3:]] if is_replay else REST
        await saying(events)(call)

    await broken(proxy, SENT)
    other = await proxy.fake(speak, "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES, seed=7) as response:
        assert texts(await response.read())[1] == "abcdefgh"
    assert other.calls.qsize() == 2


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_pieces_of_any_size_make_no_difference(proxy: ProxyHarness, size: int) -> None:
    stream = b"".join(REST)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    await broken(proxy, SENT)
    await proxy.fake(saying(pieces), "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES) as response:
        assert texts(await response.read())[1] == "abcdefgh"


async def test_one_that_fails_again_ends_with_an_error(proxy: ProxyHarness) -> None:
    async def refuse(call: Call) -> None:
        await call.head("Content-Length: 2", status="500 Internal Server Error")
        await call.send(b"no")

    await broken(proxy, SENT)
    await proxy.fake(refuse, "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES) as response:
        assert await response.content.readexactly(len(SENT)) == SENT
        assert b"error" in await response.content.readuntil(b"\n\n")


def unfinished(sent: bytes) -> Unfinished | None:
    response = CompletedResponse(EndpointKind.CHAT, is_stream=True)
    response.feed(sent)
    return response.partial_text()


def rest_of(sent: bytes, **members: Any) -> list[ProxyRequest]:
    partial = unfinished(sent)
    assert partial is not None
    record = AccessRecord("r1", Timeline())
    return [rest for rest, _ in continuations(request(**members), record, partial)]


@pytest.mark.parametrize(
    "sent",
    [
        SENT + b"data: {",
        event(reasoning_content="hm"),
        event(tool_calls=[{"index": 0}]),
        event(content="a", finish="stop"),
        b'data: {"error":{"code":500}}\n\n',
        b"data: broken\n\n",
        SENT + event(content="a" * 4 * 1024**2),
    ],
)
def test_what_is_not_plain_text_is_not_continued(sent: bytes) -> None:
    assert unfinished(sent) is None


@pytest.mark.parametrize("count", [0, 1, 40, 400])
def test_the_text_and_its_tokens_are_known_however_long_it_is(count: int) -> None:
    assert unfinished(ROLE + count * event(content="ab")) == Unfinished("ab" * count, count, "one")


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"stream": False},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]},
        {"max_tokens": 2},
    ],
)
def test_what_would_begin_anew_is_not_continued(members: dict[str, Any]) -> None:
    assert not rest_of(SENT, **members)


@pytest.mark.parametrize(
    ("members", "is_replay"),
    [
        ({}, [False]),
        ({"seed": -1}, [False]),
        ({"seed": 7}, [True, False]),
        ({"seed": -1, "temperature": 0}, [True, False]),
    ],
)
def test_only_a_repeatable_answer_is_requested_again(
    members: dict[str, Any], is_replay: list[bool]
) -> None:
    rests = rest_of(SENT, **members)
    assert [rest.json["messages"] == MESSAGES for rest in rests] == is_replay


def test_one_of_which_no_text_was_sent_begins_again() -> None:
    sent = b": wait\n\n" + ROLE
    (rest,) = rest_of(sent, max_tokens=5)
    assert json.loads(rest.body) == {**request(max_tokens=5).json}
    assert unfinished(sent) == Unfinished("", 0, "one")
