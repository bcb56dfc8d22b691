"""Answers that are assembled, refused, learnt from, or of another form than requested."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call, Script, say_ok

from proxy.forward.response import ClientResponse
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.upstream.http1 import Splitter
from proxy.upstream.upstream import Timings

TIMINGS = {"cache_n": 3, "prompt_n": 4, "prompt_ms": 5, "predicted_n": 6, "predicted_ms": 7}
TOO_LONG = {
    "code": 400,
    "message": "request (5031 tokens) exceeds the available context size (4096 tokens)",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 5031,
    "n_ctx": 4096,
}
LOADING = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
DONE = b"data: [DONE]\n\n"


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def choice(**members: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "finish_reason": None, **members}]


HI = event(choices=choice(delta={"content": "hi"}))
END = event(choices=choice(delta={}, finish_reason="stop")) + event(
    choices=[], usage={"completion_tokens": 1}, timings=TIMINGS
)


def streams(*chunks: bytes) -> Script:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        for chunk in chunks:
            await call.chunk(chunk)
        await call.end()

    return speak


def drops(*chunks: bytes) -> Script:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        for chunk in chunks:
            await call.chunk(chunk)
        call.drop()

    return speak


def says(body: bytes, status: str = "200 OK", kind: str = "application/json") -> Script:
    async def speak(call: Call) -> None:
        await call.head(f"Content-Type: {kind}", f"Content-Length: {len(body)}", status=status)
        await call.send(body)

    return speak


def errs(error: dict[str, Any], status: str) -> Script:
    return says(json.dumps({"error": error}).encode(), status)


# Assembled.


async def test_tokens_of_a_whole_response_are_counted_as_they_come_and_read_together(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bytes] = []
    read = Splitter.objects

    def note(splitter: Splitter, chunk: bytes) -> list[Mapping[str, Any]]:
        reads.append(chunk)
        return read(splitter, chunk)

    def has_decoded(tokens: int) -> bool:
        (instance,) = proxy.router.instances()
        return [lease.decoded for lease in instance.leases] == [tokens]

    async def speak(call: Call) -> None:
        await call.begin_stream()
        for count in range(1, 101):
            await call.chunk(HI)
            await until(partial(has_decoded, count))
        await call.chunk(END + DONE)
        await call.end()

    monkeypatch.setattr(Splitter, "objects", note)
    await proxy.fake(speak)
    async with proxy.ask() as response:
        body = await response.json()
    assert body["choices"][0]["message"]["content"] == 100 * "hi"
    assert len(reads) < 10


async def test_a_whole_client_response_is_put_together_from_a_stream(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(streams(b":\n\n", HI, END, DONE))
    async with proxy.ask() as response:
        client_response = await response.json()
        assert int(response.headers["Content-Length"]) == len(await response.read())
    assert json.loads((await fake.calls.get()).body)["stream"] is True
    assert client_response["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert client_response["object"] == "chat.completion"
    assert (client_response["usage"], client_response["timings"]) == (
        {"completion_tokens": 1},
        TIMINGS,
    )


async def test_an_error_within_the_stream_becomes_the_status_it_would_have_been(
    proxy: ProxyHarness,
) -> None:
    error = {"code": 500, "message": "no more memory", "type": "server_error"}
    await proxy.fake(streams(HI, event(error=error)))
    async with proxy.ask() as response:
        assert response.status == 500
        assert (await response.json())["error"]["message"] == "no more memory"


@pytest.mark.parametrize("last", [drops(HI), streams(HI), streams(HI, DONE), streams(END)])
async def test_what_breaks_before_anything_went_out_is_asked_once_more(
    proxy: ProxyHarness, last: Script
) -> None:
    async def break_once(call: Call) -> None:
        fake.script = streams(HI, END, DONE)
        await last(call)

    fake = await proxy.fake(break_once)
    async with proxy.ask() as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "hi"
    assert fake.calls.qsize() == 2


async def test_an_client_response_too_long_to_be_put_together_says_so(
    proxy: ProxyHarness,
) -> None:
    comment = b":" + b"x" * (1024**2 - 1) + b"\n\n"
    await proxy.fake(streams(HI, *[comment] * 64, END, DONE))
    async with proxy.ask() as response:
        assert response.status == 502
        assert "request a stream" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "garbage",
    [
        b'data: {"choices":7}\n\n',
        b'data: {"choices":[{}]}\n\n',
        b"data: <html>\n\n",
        b"data: {}\n\n",
    ],
)
async def test_pieces_of_no_client_response_are_a_bad_gateway(
    proxy: ProxyHarness, garbage: bytes
) -> None:
    await proxy.fake(streams(garbage, DONE))
    async with proxy.ask() as response:
        assert response.status == 502
        assert "broken stream" in (await response.json())["error"]["message"]


# Responses to another request.


async def test_a_page_where_a_stream_was_asked_is_a_bad_gateway(proxy: ProxyHarness) -> None:
    await proxy.fake(says(b"<html></html>", kind="text/html"))
    for stream in (True, False):
        async with proxy.ask(stream=stream) as response:
            assert response.status == 502
            assert "no event stream" in (await response.json())["error"]["message"]


HOSTILE = {
    "Set-Cookie": "corral_session_8080=x; Path=/corral",
    "Clear-Site-Data": '"*"',
    "Refresh": "0; url=/corral/",
    "Location": "https://example.com/",
    "Content-Security-Policy": "default-src *",
}
ALLOWED = {
    *("content-length", "content-type", "retry-after", "cache-control", "x-accel-buffering"),
    *("server", "x-request-id", "date", "transfer-encoding"),
}


def is_hostile(status: str, body: bytes, kind: str) -> Script:
    async def speak(call: Call) -> None:
        fields = [f"{name}: {value}" for name, value in HOSTILE.items()]
        head = (f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Retry-After: 3")
        await call.head(*fields, *head, status=status)
        await call.send(body)

    return speak


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": [], "stream": True}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/v1/chat/completions", {"messages": [], "logprobs": True}),
        ("POST", "/v1/messages", {"messages": [], "max_tokens": 1}),
        ("POST", "/v1/responses", {"input": "hi", "stream": True}),
        ("POST", "/v1/embeddings", {"input": "hi"}),
        ("POST", "/v1/audio/transcriptions", {"file": "hi"}),
        ("POST", "/tokenize", {"content": "hi"}),
        ("POST", "/generate", {"prompt": "hi"}),
        ("GET", "/props", None),
        ("HEAD", "/props", None),
        ("GET", "/lora-adapters", None),
    ],
)
@pytest.mark.parametrize("status", ["200 OK", "302 Found", "404 Not Found"])
async def test_an_instance_sets_no_cookie_redirects_to_nowhere_and_sends_no_page(
    proxy: ProxyHarness, method: str, path: str, body: object, status: str
) -> None:
    fake = await proxy.fake()
    for kind in ("text/html", "application/json", "text/event-stream"):
        content = HI + END + DONE if kind == "text/event-stream" else b'{"html": "<script>"}'
        fake.script = is_hostile(status, content, kind)
        async with proxy.http.request(method, path, json=body, allow_redirects=False) as response:
            names = {name.lower() for name in response.headers}
            assert {name for name in names if not name.startswith("x-corral-")} <= ALLOWED
            assert response.content_type in {"application/json", "text/event-stream"}
            assert not 300 <= response.status < 400


async def test_a_body_that_is_encoded_unasked_is_a_bad_gateway(proxy: ProxyHarness) -> None:
    async def speak(call: Call) -> None:
        await call.head("Content-Encoding: gzip", "Content-Length: 2")
        await call.send(b"{}")

    await proxy.fake(speak)
    async with proxy.http.post("/tokenize", json={"content": "hi"}) as response:
        assert response.status == 502
        assert "'gzip'" in (await response.json())["error"]["message"]


async def test_a_whole_client_response_from_who_cannot_stream_passes(proxy: ProxyHarness) -> None:
    await proxy.fake(say_ok)
    async with proxy.ask() as response:
        assert await response.json() == {"ok": True}


@pytest.mark.parametrize("garbage", [b"data: <html>\n\n", b"data: " + b"x" * 5 * 1024**2])
async def test_garbage_before_the_first_token_is_a_bad_gateway(
    proxy: ProxyHarness, garbage: bytes
) -> None:
    await proxy.fake(streams(garbage))
    async with proxy.ask(stream=True) as response:
        assert response.status == 502


async def test_a_stream_that_ends_without_its_mark_is_not_complete(proxy: ProxyHarness) -> None:
    await proxy.fake(streams(HI, HI))
    async with proxy.ask(stream=True) as response:
        body = b"".join([chunk async for chunk in until_broken(response.content)])
    assert body.startswith(HI + HI + b'data: {"error":')
    assert b"ended its stream" in body
    assert DONE not in body


async def test_a_stream_without_a_token_is_asked_once_more(proxy: ProxyHarness) -> None:
    async def nothing_once(call: Call) -> None:
        fake.script = streams(HI + DONE)
        await streams(b":\n\n")(call)

    fake = await proxy.fake(nothing_once)
    async with proxy.ask(stream=True) as response:
        assert await response.read() == HI + DONE


# Refused.


async def test_a_prompt_too_long_has_the_code_that_openais_clients_look_for(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake(errs(TOO_LONG, "400 Bad Request"))
    for stream in (True, False):
        async with proxy.ask(stream=stream) as response:
            error = (await response.json())["error"]
            assert response.status == 400
        assert error == {**TOO_LONG, "code": "context_length_exceeded", "param": None}


async def test_a_prompt_too_long_is_told_in_anthropics_plan(proxy: ProxyHarness) -> None:
    await proxy.fake(errs(TOO_LONG, "400 Bad Request"))
    async with proxy.ask("/v1/messages") as response:
        error = await response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"] == "prompt is too long: 5031 tokens > 4096 maximum"
    assert error["error"]["n_ctx"] == 4096


async def test_the_engines_own_pages_speak_its_own_words(proxy: ProxyHarness) -> None:
    await proxy.fake(errs(TOO_LONG, "400 Bad Request"))
    async with proxy.http.post("/completion", json={"prompt": "a"}) as response:
        assert (await response.json())["error"] == TOO_LONG


async def test_an_error_without_end_is_a_bad_gateway(proxy: ProxyHarness) -> None:
    await proxy.fake(says(b"x" * (1024**2 + 1), "500 Internal Server Error"))
    async with proxy.ask() as response:
        assert response.status == 502


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_that_quotes_a_long_text_is_shortened(
    proxy: ProxyHarness, *, stream: bool
) -> None:
    said = "Failed to parse tool call arguments as JSON: last read: '\\" + "x" * 1024**2
    error = {"code": 500, "message": said, "type": "server_error"}
    await proxy.fake(errs(error, "500 Internal Server Error"))
    async with proxy.ask(stream=stream) as response:
        assert response.status == 400
        message = (await response.json())["error"]["message"]
    assert message.startswith(said[:500])
    assert message.endswith("too long to show)")
    assert len(message) < 1100


async def test_an_instance_that_still_loads_is_passed_over(proxy: ProxyHarness) -> None:
    await proxy.fake(errs(LOADING, "503 Service Unavailable"), "chat.1")
    await proxy.fake(say_ok, "chat.2")
    for _ in range(2):
        async with proxy.ask() as response:
            assert await response.json() == {"ok": True}


async def test_where_all_still_load_the_client_is_told_when_to_ask_again(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake(errs(LOADING, "503 Service Unavailable"))
    async with proxy.ask() as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "model_loading"


# Learnt from.


@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_client_response_cost_is_learnt_whichever_way_it_was_given(
    proxy: ProxyHarness, *, stream: bool
) -> None:
    await proxy.fake(streams(HI, END, DONE))
    async with proxy.ask(stream=stream) as response:
        await response.read()
    await proxy.core.server_state.in_flight.wait_empty()
    (finished,) = proxy.events("request.finished")
    assert (finished["cached_tokens"], finished["prompt_tokens"]) == (3, 4)


async def test_a_passed_body_is_learnt_from_too(proxy: ProxyHarness) -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": "hi"}}], "timings": TIMINGS}
    await proxy.fake(says(json.dumps(body).encode()))
    async with proxy.ask(logprobs=True) as response:
        assert await response.json() == body
    assert proxy.events("request.finished")[0]["decoded_tokens"] == 6


@pytest.mark.parametrize("stream", [True, False])
async def test_the_message_is_learnt_by_which_the_next_turn_is_known(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    learnt: list[Any] = []
    monkeypatch.setattr(Router, "finish", lambda *given: learnt.append(given[2]))
    await proxy.fake(streams(HI, END, DONE))
    async with proxy.ask(stream=stream) as response:
        await response.read()
    await proxy.core.server_state.in_flight.wait_empty()
    message = {"role": "assistant", "content": "hi"}
    timings = Timings.read(TIMINGS)
    assert learnt == [Completion(timings, message, timings)]


async def test_a_slot_is_free_once_the_client_response_is_whole_and_not_only_once_it_was_read(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake(streams(HI, END, DONE))
    async with proxy.ask(stream=True) as response:
        await response.content.readuntil(DONE)
        assert proxy.router.instances()[0].leases == ()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_reads_gets_the_end_before_the_router_learns(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch, *, is_stream: bool
) -> None:
    steps: list[str] = []
    send_last, finish = ClientResponse._send_last, Router.finish

    async def end(response: ClientResponse, last: bytes) -> None:
        await send_last(response, last)
        steps.append("end")

    def learn(router: Router, lease: Lease, completed: Completion | None = None) -> None:
        finish(router, lease, completed)
        steps.append("learnt")

    monkeypatch.setattr(ClientResponse, "_send_last", end)
    monkeypatch.setattr(Router, "finish", learn)
    proxy.router.signals.answered.connect(lambda lease: steps.append(str(lease.is_reported)))
    await proxy.fake(streams(HI, END, DONE))
    async with proxy.ask(stream=is_stream) as response:
        assert response.status == 200
        await response.read()
    assert steps[:3] == ["True", "end", "learnt"]


async def test_a_client_is_told_who_answered(proxy: ProxyHarness) -> None:
    await proxy.fake(say_ok)
    async with proxy.ask() as response:
        assert response.headers["X-Corral-Instance"] == "chat.1"
        assert "X-Corral-Queue-Ms" not in response.headers


async def test_a_client_that_waited_is_told_how_long_and_at_which_place(
    proxy: ProxyHarness,
) -> None:
    async def speak(call: Call) -> None:
        await end.wait()
        await say_ok(call)

    end = asyncio.Event()
    fake = await proxy.fake(speak, is_admitted=False)
    proxy.router.admit(fake.upstream(slots=1))
    async with asyncio.TaskGroup() as group:
        group.create_task(proxy.send())
        await fake.calls.get()
        second = group.create_task(_headers(proxy))
        await until(lambda: proxy.router.queues.stats()["chat"].interactive == 1)
        end.set()
    assert second.result()["X-Corral-Queue-Position"] == "1"
    assert int(second.result()["X-Corral-Queue-Ms"]) >= 0


async def _headers(proxy: ProxyHarness) -> Any:
    async with proxy.ask() as response:
        return response.headers


async def until_broken(content: Any) -> Any:
    """Yield the received pieces, and end where the body breaks off."""
    try:
        async for chunk in content.iter_any():
            yield chunk
    except ClientPayloadError:
        return
