"""The Responses API against instances that answer as a test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.openai_events import check_response, check_stream, parsed
from support.proxy_harness import ProxyHarness
from support.response_streams import STREAMS, opened, text_events
from support.upstream import Call, Script

from proxy.settings import StoredResponseSettings

PATH = "/v1/responses"


def stream_of(*chunks: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.begin_stream()
        for chunk in chunks:
            await call.chunk(chunk)
        await call.end()

    return script


@pytest.fixture
async def storing(proxy: ProxyHarness) -> ProxyHarness:
    await proxy.open(stored_responses=StoredResponseSettings(enabled=True))
    return proxy


async def post(proxy: ProxyHarness, **members: Any) -> tuple[int, bytes]:
    body = {"model": "chat", "input": "hello", **members}
    async with proxy.http.post(PATH, json=body) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("name", STREAMS)
async def test_each_event_is_passed_on_as_openais(proxy: ProxyHarness, name: str) -> None:
    await proxy.fake(stream_of(*STREAMS[name]))
    status, stream = await post(proxy, stream=True)
    assert status == 200
    check_stream(parsed(stream))


@pytest.mark.parametrize("name", sorted(set(STREAMS) - {"nothing"}))
async def test_a_whole_response_has_all_members(proxy: ProxyHarness, name: str) -> None:
    await proxy.fake(stream_of(*STREAMS[name]))
    status, body = await post(proxy, temperature=0.5, metadata={"a": "b"})
    response = json.loads(body)
    assert status == 200
    check_response(response)
    assert (response["temperature"], response["metadata"]) == (0.5, {"a": "b"})


async def test_a_stream_without_an_end_is_not_made_to_look_complete(proxy: ProxyHarness) -> None:
    await proxy.fake(stream_of(*opened(), *text_events("Hel", "lo")))
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(proxy, stream=True)
    (failure,) = proxy.events("upstream.failed")
    assert "ended its stream" in failure["error"]


async def test_a_broken_stream_ends_with_an_error_event(proxy: ProxyHarness) -> None:
    async def breaks_off(call: Call) -> None:
        await call.begin_stream()
        for chunk in [*opened(), *text_events("Hel", "lo")[:3]]:
            await call.chunk(chunk)
        call.drop()

    await proxy.fake(breaks_off)
    async with proxy.raw() as (reader, writer):
        body = json.dumps({"model": "chat", "input": "a", "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
    (event,) = [part for part in answer.split(b"\n\n") if b'"type":"error"' in part]
    assert b"event: error\n" in event
    assert b'"message":"chat.1 broke off its answer"' in event


async def test_a_response_is_shown_and_deleted(storing: ProxyHarness) -> None:
    fake = await storing.fake(stream_of(*STREAMS["text"]))
    _, body = await post(storing)
    first = json.loads(body)
    assert first["store"] is True
    async with storing.http.get(f"{PATH}/{first['id']}") as response:
        assert (response.status, await response.json()) == (200, first)
    _, body = await post(storing, previous_response_id=first["id"], stream=True)
    assert {event["response"]["previous_response_id"] for event in parsed(body)[:2]} == {
        first["id"]
    }
    calls = [json.loads(fake.calls.get_nowait().body) for _ in range(2)]
    assert [item["role"] for item in calls[1]["input"]] == ["user", "assistant", "user"]
    async with storing.http.delete(f"{PATH}/{first['id']}") as response:
        gone = {"id": first["id"], "object": "response", "deleted": True}
        assert await response.json() == gone
    for ask in (storing.http.get, storing.http.delete):
        async with ask(f"{PATH}/{first['id']}") as response:
            assert response.status == 404
            assert "not found" in (await response.json())["error"]["message"]


async def test_a_response_in_the_background_is_refused(storing: ProxyHarness) -> None:
    await storing.fake(stream_of(*STREAMS["text"]))
    status, body = await post(storing, background=True)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "background" in error["message"]
    status, body = await post(storing, background=False)
    assert (status, json.loads(body)["background"]) == (200, False)


async def test_another_key_sees_nothing(proxy: ProxyHarness, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text('[keys.me]\nkey = "corral-me-1234"\n[keys.you]\nkey = "corral-you-1234"\n')
    settings = StoredResponseSettings(enabled=True)
    await proxy.open(api_keys_file=keys, stored_responses=settings)
    await proxy.fake(stream_of(*STREAMS["text"]))
    me, you = ({"X-Api-Key": f"corral-{name}-1234"} for name in ("me", "you"))
    asked = {"model": "chat", "input": "a"}
    async with proxy.http.post(PATH, json=asked, headers=me) as response:
        path = f"{PATH}/{(await response.json())['id']}"
    for send in (proxy.http.get, proxy.http.delete):
        async with send(path, headers=you) as response:
            assert response.status == 404
    for headers, status in ((you, 404), (me, 200)):
        async with proxy.http.get(f"{path}/input_items", headers=headers) as response:
            assert response.status == status
    more = {**asked, "previous_response_id": path.rpartition("/")[2]}
    for headers, status in ((you, 400), (me, 200)):
        async with proxy.http.post(PATH, json=more, headers=headers) as response:
            assert response.status == status
    async with proxy.http.get(path, headers=me) as response:
        assert response.status == 200


async def test_an_unknown_response_is_openais_error(storing: ProxyHarness) -> None:
    await storing.fake(stream_of(*STREAMS["text"]))
    status, body = await post(storing, previous_response_id="resp_9")
    assert (status, json.loads(body)["error"]) == (
        400,
        {
            "message": "Previous response with id 'resp_9' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        },
    )


async def test_without_stored_responses_the_error_says_how(proxy: ProxyHarness) -> None:
    await proxy.fake(stream_of(*STREAMS["text"]))
    _, body = await post(proxy)
    first = json.loads(body)
    assert first["store"] is False
    status, body = await post(proxy, previous_response_id=first["id"])
    assert status == 400
    assert b"[proxy.stored_responses]" in body
    async with proxy.http.get(f"{PATH}/{first['id']}") as response:
        assert response.status == 404
        assert b"[proxy.stored_responses]" in await response.read()


async def test_a_stored_conversation_is_no_longer_than_a_body(storing: ProxyHarness) -> None:
    await storing.fake(stream_of(*STREAMS["text"]))
    _, body = await post(storing, input="x" * 99_000)
    status, body = await post(storing, previous_response_id=json.loads(body)["id"])
    assert (status, json.loads(body)["error"]["code"]) == (400, "limit_exceeded")
