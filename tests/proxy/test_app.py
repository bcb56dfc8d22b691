"""The pages, the models they are for, and the shapes of their errors."""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call

from proxy.errors import ModelLoading
from proxy.forward.response import ClientResponse
from proxy.upstream.endpoint_kinds import ENDPOINTS


async def hold(call: Call) -> None:
    await call.until_left()


@pytest.mark.parametrize("path", ENDPOINTS["POST"])
async def test_every_post_endpoint_is_forwarded_under_its_path(
    proxy: ProxyHarness, path: str
) -> None:
    fake = await proxy.fake()
    async with proxy.http.post(path, json={"model": "chat"}) as response:
        assert await response.json() == {"ok": True}
    assert (await fake.calls.get()).line == f"POST {path} HTTP/1.1"


@pytest.mark.parametrize("path", ENDPOINTS["GET"])
async def test_every_get_endpoint_is_forwarded_by_the_model_in_its_query(
    proxy: ProxyHarness, path: str
) -> None:
    fake = await proxy.fake()
    proxy.loader.model_infos = [model_info("chat"), model_info("other")]
    async with proxy.http.get(f"{path}?model=vendor/chat") as response:
        assert response.status == 200
    assert (await fake.calls.get()).line == f"GET {path}?model=vendor/chat HTTP/1.1"


@pytest.mark.parametrize(
    "path", ["/slots", "/props", "/lora-adapters", "/metrics", "/health", "/v1/models"]
)
async def test_endpoints_that_change_an_instance_are_not_forwarded(
    proxy: ProxyHarness, path: str
) -> None:
    fake = await proxy.fake()
    async with proxy.http.post(path, json={"model": "chat"}) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "GET, HEAD"
    assert fake.calls.empty()


async def test_an_unknown_path_is_404_in_openais_shape(proxy: ProxyHarness) -> None:
    async with proxy.http.post("/nope", json=[]) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "not_found", None)


async def test_an_unknown_model_is_404_with_the_known_ones(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("code")]
    async with proxy.ask(model="chta") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (404, "model_not_found")
    assert "did you mean chat?" in error["message"]
    assert "chat, code" in error["message"]


async def test_anthropics_clients_get_their_own_error_shape(proxy: ProxyHarness) -> None:
    async with proxy.ask("/v1/messages", model="claude") as response:
        content = await response.json()
    assert (content["type"], content["error"]["type"]) == ("error", "not_found_error")


async def test_a_request_without_a_model_gets_the_only_one(proxy: ProxyHarness) -> None:
    await proxy.fake()
    async with proxy.http.post("/tokenize", json={"content": "a"}) as response:
        assert response.status == 200


async def test_a_request_without_a_model_among_several_is_rejected(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [model_info("chat"), model_info("code")]
    async with proxy.http.post("/tokenize", json={"content": "a"}) as response:
        assert response.status == 400
        assert "chat, code" in (await response.json())["error"]["message"]


async def test_a_model_that_is_not_loaded_is_loaded_first(proxy: ProxyHarness) -> None:
    proxy.loader.asleep = [await proxy.fake(is_admitted=False)]
    async with proxy.ask() as response:
        assert response.status == 200
    assert proxy.loader.began.is_set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("value", "status"), [("false", 503), ("0", 503), ("true", 200), ("1", 200)]
)
async def test_a_request_can_ask_not_to_load(
    proxy: ProxyHarness, path: str, value: str, status: int
) -> None:
    proxy.loader.model_infos = [model_info("chat", "unloaded")]
    proxy.loader.asleep = [await proxy.fake(is_admitted=False)]
    async with proxy.ask(f"{path}?autoload={value}") as response:
        assert response.status == status
        if status == 503:
            assert (await response.json())["error"]["code"] == "not_loaded"
    assert proxy.loader.began.is_set() == (status == 200)


async def test_a_request_that_asks_not_to_load_is_answered_by_a_loaded_model(
    proxy: ProxyHarness,
) -> None:
    await proxy.fake()
    async with proxy.ask("/v1/chat/completions?autoload=false") as response:
        assert response.status == 200


async def test_a_slow_load_is_503_with_retry_after(proxy: ProxyHarness) -> None:
    proxy.loader.failure = ModelLoading("chat is loading: 47 %", retry_after_s=3)
    async with proxy.ask() as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "3")
        assert (await response.json())["error"]["code"] == "model_loading"


async def test_a_model_that_is_withdrawn_after_its_load_is_unavailable(
    proxy: ProxyHarness,
) -> None:
    async with proxy.ask() as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")


# Health and models.


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_ok_while_one_model_can_be_served(proxy: ProxyHarness, path: str) -> None:
    proxy.loader.model_infos = [model_info("a", "failed"), model_info("b", "unloaded")]
    await proxy.fake()
    async with proxy.http.get(path) as response:
        assert (response.status, await response.json()) == (
            200,
            {
                "status": "ok",
                "models": {"loaded": 0, "loading": 0, "unloaded": 1, "failed": 1},
                "slots_idle": 2,
                "slots_processing": 0,
            },
        )


@pytest.mark.parametrize(
    ("model_infos", "code", "reason"),
    [
        (
            [model_info("a", "loading"), model_info("b", "failed")],
            "model_loading",
            "no model is loaded yet; 1 of 2 loading",
        ),
        (
            [model_info("a", "failed", "no such file /home/me/a.gguf")],
            "unavailable",
            "no model can be served, 1 of 1 failed; see `corral status` on this machine",
        ),
        ([], "unavailable", "no model is configured"),
    ],
)
async def test_health_is_503_without_a_cause(
    proxy: ProxyHarness, model_infos: Any, code: str, reason: str
) -> None:
    proxy.loader.model_infos = model_infos
    async with proxy.http.get("/health/live") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    async with proxy.http.get("/health") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["message"]) == (503, code, reason)
    assert ("Retry-After" in response.headers) == (code == "model_loading")
    assert proxy.emitted == []


async def test_the_list_has_every_model_loaded_or_not(proxy: ProxyHarness) -> None:
    proxy.loader.model_infos = [
        model_info("a"),
        model_info("b", "unloaded"),
        model_info("c", "failed", "broken"),
    ]
    async with proxy.http.get("/v1/models") as response:
        page = await response.json()
    models = page.pop("data")
    assert [entry["name"] for entry in page.pop("models")] == ["a", "b", "c"]
    assert page == {"object": "list", "has_more": False, "first_id": "a", "last_id": "c"}
    assert [(model["id"], model["status"]["value"]) for model in models] == [
        ("a", "loaded"),
        ("b", "unloaded"),
        ("c", "unloaded"),
    ]
    assert models[0] == {
        "id": "a",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "llama-corral",
        "type": "model",
        "display_name": "a",
        "created_at": "2023-11-14T22:13:20+00:00",
        "max_input_tokens": 2048,
        "aliases": ["vendor/a"],
        "context_length": 2048,
        "variant_of": None,
        "meta": {"n_ctx": 2048, "slots": 2},
        "status": {"value": "loaded", "failed": False, "reason": None},
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "tags": [],
        "source": "preset",
        "can_remove": False,
    }


META: dict[str, int | str] = {
    "n_params": 134_515_008,
    "size": 90_000_000,
    "ftype": "Q4_1",
    "n_ctx_train": 2048,
}


async def test_the_list_has_the_metadata_of_unloaded_models_too(
    proxy: ProxyHarness,
) -> None:
    sees = ("text", "image")
    proxy.loader.model_infos = [
        replace(model_info("a", "unloaded"), meta=META, input_modalities=sees)
    ]
    async with proxy.http.get("/v1/models") as response:
        page = await response.json()
    assert page["data"][0]["meta"] == {**META, "n_ctx": 2048, "slots": 2}
    assert page["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    (entry,) = page["models"]
    assert entry["capabilities"] == ["completion", "multimodal"]
    assert (entry["model"], entry["id"], entry["context_length"]) == ("a", "a", 2048)
    assert (entry["size"], entry["details"]["parameter_size"]) == (90_000_000, "134.52M")
    assert entry["details"]["quantization_level"] == "Q4_1"


async def test_codex_gets_no_entries_that_it_would_reject(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/v1/models?client_version=0.44.0") as response:
        page = await response.json()
    assert (page["models"], [model["id"] for model in page["data"]]) == ([], ["chat"])


@pytest.mark.parametrize("name", ["a", "vendor/a"])
async def test_a_models_endpoint_accepts_slashes_in_its_id(proxy: ProxyHarness, name: str) -> None:
    proxy.loader.model_infos = [model_info("a")]
    async with proxy.http.get(f"/v1/models/{name}") as response:
        assert (await response.json())["id"] == "a"


async def test_the_endpoint_of_an_unknown_model_is_404(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/v1/models/nope") as response:
        assert response.status == 404


# Slots.


async def test_slots_lists_the_slots_of_all_instances(proxy: ProxyHarness) -> None:
    busy = await proxy.fake(hold)
    await proxy.fake(name="chat.2")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(proxy.send())
        await busy.calls.get()
        async with proxy.http.get("/slots") as response:
            slots = await response.json()
        asking.cancel()
    assert [slot["id"] for slot in slots] == [0, 1, 0, 1]
    assert [(slot["instance"], slot["state"]) for slot in slots if slot["is_processing"]] == [
        ("chat.1", "prefill")
    ]


async def test_the_overview_adds_instances_totals_and_queues(proxy: ProxyHarness) -> None:
    await proxy.fake()
    await proxy.send()
    async with proxy.http.get("/corral/v1/slots?model=vendor/chat") as response:
        whole = await response.json()
    totals = whole["totals"]
    assert totals["num_slots"] == totals["num_idle_slots"] == len(whole["slots"]) == 2
    assert [instance["instance"] for instance in whole["instances"]] == ["chat.1"]
    assert whole["queues"]["chat"]["interactive"] == 0


@pytest.mark.parametrize("path", ["/slots", "/corral/v1/slots"])
async def test_the_slots_of_an_unknown_model_are_not_found(proxy: ProxyHarness, path: str) -> None:
    async with proxy.http.get(f"{path}?model=nope") as response:
        assert response.status == 404


async def test_slots_can_fail_when_no_slot_is_free(proxy: ProxyHarness) -> None:
    fake = await proxy.fake(hold, is_admitted=False)
    proxy.router.admit(fake.upstream(slots=1))
    async with proxy.http.get("/slots?fail_on_no_slot=1") as response:
        assert response.status == 200
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(proxy.send())
        await fake.calls.get()
        async with proxy.http.get("/slots?fail_on_no_slot=1") as response:
            assert response.status == 503
        asking.cancel()


# The door.


async def test_every_response_has_its_request_id(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.http.post("/tokenize", json={}, headers={"X-Request-Id": "mine-1"}) as answer:
        assert answer.headers["X-Request-Id"] == "mine-1"
    assert (await fake.calls.get()).headers["X-Request-Id"] == "mine-1"
    async with proxy.http.get("/nope", headers={"X-Request-Id": "a b"}) as answer:
        assert answer.headers["X-Request-Id"].startswith("req_")


async def test_a_request_is_logged_once_when_it_ends(proxy: ProxyHarness) -> None:
    await proxy.fake()
    async with proxy.ask() as response:
        name = response.headers["X-Request-Id"]
        await response.read()
    (event,) = proxy.events("request.finished")
    assert event.pop("conversation") > 0
    assert event.pop("duration_ms") >= event.pop("first_byte_ms") >= event.pop("queued_ms") >= 0
    assert event.pop("prefill_ms") > 0
    assert event.pop("other_ms") >= 0
    assert event == {
        "request": name,
        "client": "127.0.0.1",
        "path": "/v1/chat/completions",
        "model": "chat",
        "fallback_for": None,
        "instance": "chat.1",
        "slot": None,
        "kind": "chat",
        "streamed": False,
        "priority": "interactive",
        "diverted": None,
        "status": 200,
        "code": None,
        "cancelled": None,
        "attempts": 1,
        "continued": None,
        "tool_calls": None,
        "rules": None,
        "yields": None,
        "evict_ms": 0,
        "load_ms": 0,
        "slots_ms": 0,
        "decode_ms": 0,
        "paused_ms": 0,
        "stalled_ms": 0,
        "first_token_ms": None,
        "bytes_out": 11,
        "expected_cached_tokens": None,
        "cached_tokens": None,
        "prompt_tokens": None,
        "decoded_tokens": None,
        "engine_prefill_ms": None,
        "engine_decode_ms": None,
        "drafted_tokens": None,
        "accepted_tokens": None,
        "cache_cause": None,
        "cache_tier": None,
        "cache": None,
    }
    assert len(proxy.emitted) == 1


async def test_a_rejected_request_is_logged_once_with_the_reason(proxy: ProxyHarness) -> None:
    async with proxy.ask(model="nope") as response:
        name = response.headers["X-Request-Id"]
    ((emitted, event),) = proxy.emitted
    assert emitted == "request.rejected"
    assert (event["request"], event["model"], event["status"]) == (name, None, 404)
    assert event["code"] == "model_not_found"
    assert "there is no model 'nope'" in event["reason"]


async def test_a_client_disconnect_during_a_load_is_logged_as_499(proxy: ProxyHarness) -> None:
    proxy.loader.may_go_on.clear()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(proxy.send())
        await proxy.loader.began.wait()
        asking.cancel()
    await proxy.core.server_state.in_flight.wait_empty()
    assert proxy.events("request.finished")[0]["status"] == 499


async def test_a_failed_write_is_a_client_disconnect(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ConnectionResetError

    await proxy.fake()
    monkeypatch.setattr(ClientResponse, "_send_last", fail)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await proxy.send()
    assert proxy.events("request.finished")[0]["status"] == 499
    assert not proxy.events("upstream.failed")


async def test_an_internal_error_is_500(
    proxy: ProxyHarness, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.loader.failure = ZeroDivisionError()
    async with proxy.ask() as response:
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "internal_error"
    assert "internal error in request" in caplog.text


async def test_an_internal_error_within_a_response_aborts_the_connection(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n')
        await heard.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    heard = asyncio.Event()
    await proxy.fake(speak)
    monkeypatch.setattr(ClientResponse, "finish", fail)
    async with proxy.ask(stream=True) as response:
        assert b"hi" in await response.content.readany()
        heard.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert "internal error in request" in caplog.text


async def test_an_internal_error_after_the_header_aborts_the_connection(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    await proxy.fake()
    monkeypatch.setattr(ClientResponse, "finish", fail)
    with pytest.raises(aiohttp.ClientConnectionError):
        async with proxy.ask():
            pass


class RecordingTransport:
    """Passes all on to a transport, and records the written bytes."""

    def __init__(self, transport: asyncio.Transport | None, packets: list[bytes]) -> None:
        self._transport = transport
        self._packets = packets

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, packet: bytes) -> None:
        self._packets.append(packet)
        assert self._transport is not None
        self._transport.write(packet)


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bytes written to clients."""
    packets = list[bytes]()

    def transport(request: web.BaseRequest) -> RecordingTransport:
        return RecordingTransport(request.protocol.transport, packets)

    monkeypatch.setattr(web.BaseRequest, "transport", property(transport))
    return packets


async def test_header_first_bytes_and_end_are_one_write(
    proxy: ProxyHarness, packets: list[bytes]
) -> None:
    await proxy.fake()
    async with proxy.ask() as response:
        assert await response.read()
    assert [packet[:15] for packet in packets] == [b"HTTP/1.1 200 OK"]


async def test_an_unknown_expectation_is_417(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n\r\n")
        assert b" 417 " in await reader.readline()


async def test_a_body_is_requested_only_for_an_accepted_request(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(b"POST /none HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n")
        writer.write(b"Content-Length: 2\r\n\r\n")
        assert b" 404 " in await reader.readline()
