"""Clients that ask get the explanation with the response, in a place that libraries pass on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support import response_streams
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call, Script

from supervisor.builds.discover import Engine

ASK = {"X-Corral-Explain": "1"}
PLACE = ("Instance", "Slot")
TIMINGS = {"cache_n": 2, "prompt_n": 700, "prompt_ms": 9.5, "predicted_n": 1, "predicted_ms": 1}
QUESTION = "what is it that we saw at the river behind the garden, and why was it there? " * 3
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "chat"}


def data(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def choice(finish_reason: str | None, text: str) -> list[dict[str, Any]]:
    return [{"index": 0, "finish_reason": finish_reason, "delta": {"content": text}}]


CHAT = (
    data(**CHUNK, choices=choice(None, 'so "stop":true [DONE]')),
    data(**CHUNK, choices=choice("stop", ""), timings=TIMINGS),
    b"data: [DONE]\n\n",
)
USAGE = {"input_tokens": 700, "output_tokens": 1, "cache_read_input_tokens": 2}
MESSAGES = tuple(
    response_streams.written(**event)
    for event in (
        {"type": "message_start", "message": {"id": "msg_1", "role": "assistant", "usage": USAGE}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "so"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE},
        {"type": "message_stop"},
    )
)
COMPLETED = json.loads(
    response_streams.closed(response_streams.text_item("so")).partition(b"data: ")[2]
)
RESPONSES = (
    *response_streams.opened(),
    response_streams.written(**COMPLETED, timings=TIMINGS),
)
NATIVE = (
    data(index=0, content="so", stop=False),
    # llama-server writes no space behind a colon
    b'data: {"index":0,"content":"","stop":true,"timings":%s}\n\n' % json.dumps(TIMINGS).encode(),
)
STREAMS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/completion": NATIVE,
}


def says(stream: tuple[bytes, ...], size: int) -> Script:
    async def script(call: Call) -> None:
        await call.begin_stream()
        whole = b"".join(stream)
        for at in range(0, len(whole), size):
            await call.chunk(whole[at : at + size])
        await call.end()

    return script


def events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def question(path: str, *, stream: bool) -> dict[str, Any]:
    said = [{"role": "user", "content": QUESTION}]
    prompts: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": said},
        "/completion": {"prompt": QUESTION},
    }
    return {"model": "chat", "stream": stream, **prompts.get(path, {"messages": said})}


@pytest.mark.parametrize("size", [7, 100_000])
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_ends_with_the_explanation(
    proxy: ProxyHarness, path: str, size: int
) -> None:
    await proxy.fake(says(STREAMS[path], size))
    async with proxy.http.post(path, json=question(path, stream=True), headers=ASK) as response:
        body = await response.read()
    *before, last = events(body)
    told = last.pop("corral")
    assert told["cause"] == "first_request"
    assert told["cache"]["tokens"] == 702
    assert not any("corral" in entry for entry in before)
    if path == "/v1/chat/completions":
        assert last == {"choices": [], **CHUNK}
        assert body.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        sent = list(events(b"".join(STREAMS[path])))
        assert [entry.get("type") for entry in (*before, last)] == [
            request.get("type") for request in sent
        ]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_whole_response_has_the_explanation(proxy: ProxyHarness, path: str) -> None:
    await proxy.fake(says(STREAMS[path], 100_000))
    asked = question(path, stream=False)
    async with (
        proxy.http.post(path, json=asked) as plain,
        proxy.http.post(path, json=asked, headers=ASK) as response,
    ):
        expected, explained = await plain.json(), await response.json()
    told = explained.pop("corral")
    assert explained.keys() == expected.keys()
    assert told["request"] == response.headers["X-Request-Id"]
    assert told["cause"] in {"first_request", "slot_evicted", "not_found", "message_changed"}


async def test_an_error_stays_as_it_is(proxy: ProxyHarness) -> None:
    async def refuses(call: Call) -> None:
        await call.head("Content-Type: application/json", "Content-Length: 48", status="400 Bad")
        await call.send(b'{"error":{"code":400,"message":"no","type":"x"}}')

    await proxy.fake(refuses)
    asked = question("/v1/chat/completions", stream=True)
    async with proxy.http.post("/v1/chat/completions", json=asked, headers=ASK) as response:
        assert response.status == 400
        assert (await response.json()).keys() == {"error"}


async def test_a_stream_that_breaks_off_is_not_made_to_look_complete(proxy: ProxyHarness) -> None:
    async def breaks(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(CHAT[0])
        call.drop()

    await proxy.fake(breaks)
    asked = question("/v1/chat/completions", stream=True)
    async with proxy.http.post("/v1/chat/completions", json=asked, headers=ASK) as response:
        with pytest.raises(Exception, match=r"payload|closed|Connection"):
            await response.read()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_header_has_the_slot_that_the_engine_used(
    proxy: ProxyHarness, engine: Engine, tiny_model: Path, *, is_stream: bool
) -> None:
    options = ("-c", "4096", "-np", "2", "-t", "1", "--no-kv-unified")
    with engines.running(engine, tiny_model, *options, "-sps", "0") as socket:
        upstream = engines.upstream(socket, 2)
        proxy.router.admit(replace(upstream, can_name_slots=True, cache_key="key"))
        for prompt in ("the cat", "an owl", "the cat sat"):
            body = {"model": "chat", "prompt": prompt, "n_predict": 2, "stream": is_stream}
            async with proxy.http.post("/completion", json=body, headers=ASK) as response:
                instance, slot = (response.headers[f"X-Corral-{name}"] for name in PLACE)
                last = (await response.read()).rpartition(b"data: ")[2]
            assert (instance, slot) == ("chat.1", str(json.loads(last)["id_slot"]))
            async with proxy.http.get(f"/slots/{slot}", params={"instance": instance}) as found:
                assert (await found.json())["id"] == int(slot)
        body = {"model": "chat", "prompt": "the cat sat", "n_predict": 2}
        async with proxy.http.post("/completion", json=body) as response:
            assert "X-Corral-Slot" not in response.headers


async def test_a_response_that_another_instance_repeats_is_explained_once(
    proxy: ProxyHarness,
) -> None:
    """The first instance is stopped within its response, of which the client has nothing yet."""
    has_begun = asyncio.Event()

    async def say_half(call: Call) -> None:
        await call.head("Content-Type: application/json", "Content-Length: 100")
        await call.send(b'{"choices": [')
        has_begun.set()
        await call.until_left()

    await proxy.fake(say_half, "chat.1")
    well = await proxy.fake(name="chat.2", is_admitted=False)

    async def ask() -> Any:
        members = {"model": "chat", "messages": [], "logprobs": True}
        async with proxy.http.post("/v1/chat/completions", json=members, headers=ASK) as response:
            return await response.json()

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask())
        await has_begun.wait()
        await until(lambda: proxy.router.activity("chat.1").bytes_received > 0)
        proxy.router.admit(well.upstream())
        await proxy.router.close("chat.1")
    answer = asking.result()
    assert answer["ok"] is True
    assert answer["corral"]["instance"] == "chat.2"
