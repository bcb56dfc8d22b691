"""A chat that was on trial goes on elsewhere: once, whole, and only where it is plain text."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from fakes.proxy_harness import ProxyHarness
from fakes.requests import ask
from fakes.upstream import Call, Script

from proxy.endpoints import EndpointKind
from proxy.forward.continuation import continuation

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


async def broken(proxy: ProxyHarness, sent: bytes) -> None:
    """Start an instance on trial that crashes after these bytes."""

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(sent)
        call.drop()
        await asyncio.sleep(0)
        proxy.router.ended("chat.1", is_crash=True)
        proxy.router.withdraw("chat.1")

    fake = await proxy.fake(speak, "chat.1", is_admitted=False)
    proxy.router.admit(replace(fake.upstream(), reports_exit=True, trial_share=1.0))


def saying(events: list[bytes]) -> Script:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        for one in events:
            await call.chunk(one)
        await call.end()

    return speak


def texts(stream: bytes) -> tuple[list[dict[str, Any]], str]:
    lines = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line]
    assert lines.pop() == "[DONE]"
    found = [json.loads(line) for line in lines]
    deltas = [one["choices"][0]["delta"] for one in found if one["choices"]]
    return found, "".join(delta.get("content") or "" for delta in deltas)


async def test_the_client_gets_the_rest_in_the_same_stream(proxy: ProxyHarness) -> None:
    await broken(proxy, SENT)
    other = await proxy.fake(saying(REST), "chat.2")
    async with proxy.ask(stream=True, messages=MESSAGES, max_tokens=6) as response:
        found, text = texts(await response.read())
    assert text == "abcdefgh"
    assert {one["id"] for one in found} == {"one"}
    assert sum("role" in one["choices"][0]["delta"] for one in found if one["choices"]) == 1
    assert found[-1]["usage"] == {"completion_tokens": 4, "prompt_tokens": 7}
    asked = json.loads((await other.calls.get()).body)
    assert asked["messages"] == [*MESSAGES, {"role": "assistant", "content": "abcd"}]
    assert asked["max_tokens"] == 4
    (finished,) = proxy.events("request.finished")
    assert (finished["status"], finished["attempts"]) == (200, 2)


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


@pytest.mark.parametrize(
    ("members", "sent"),
    [
        ({}, SENT + b"data: {"),
        ({}, event(reasoning_content="hm")),
        ({}, event(tool_calls=[])),
        ({}, event(content="a", finish="stop")),
        ({}, b"data: broken\n\n"),
        ({}, None),
        ({"n": 2}, SENT),
        ({"stream": False}, SENT),
        ({"tools": []}, SENT),
        ({"response_format": {"type": "json_object"}}, SENT),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, SENT),
        ({"max_tokens": 2}, SENT),
    ],
)
def test_what_would_begin_anew_is_not_continued(
    members: dict[str, Any], sent: bytes | None
) -> None:
    assert continuation(request(**members), sent) is None


def test_one_of_which_no_text_was_sent_begins_again() -> None:
    found = continuation(request(max_tokens=5), b": wait\n\n" + ROLE)
    assert found
    assert json.loads(found.request.body) == {**request(max_tokens=5).json}
    assert (found.text, found.tokens) == ("", 0)
