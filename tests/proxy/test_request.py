"""What a body may be, and which model it means."""

from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from fakes.house import House, card

from proxy.carry.variant import Variant
from proxy.home.prefix import read_prompt
from proxy.request import Ask

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut short"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"model": NaN}', id="NaN"),
        pytest.param(b'{"model": 7}', id="model is a number"),
        pytest.param(b'{"model": "\xff"}', id="not UTF-8"),
        pytest.param(b'{"model": "\\ud800"}', id="half a surrogate pair"),
        pytest.param(DEEP, id="100000 levels deep"),
    ],
)
async def test_a_body_that_is_no_request_is_a_bad_request(house: House, body: bytes) -> None:
    await house.open(max_body_bytes=2_000_000)
    fake = await house.fake()
    async with house.http.post("/v1/chat/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert fake.calls.empty()


async def test_of_a_member_given_twice_the_last_counts(house: House) -> None:
    await house.fake()
    body = b'{"model": "nope", "model": "chat"}'
    async with house.http.post("/tokenize", data=body) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["\N{SNOWMAN}", "a\nb", "x" * 5000, "%ff", "../../etc"])
async def test_a_strange_model_name_is_just_an_unknown_one(house: House, name: str) -> None:
    async with house.http.get("/props", params={"model": name}) as response:
        assert response.status == 404
        assert len((await response.json())["error"]["message"]) < 1000


async def test_a_query_that_is_not_utf_8_is_an_unknown_model_too(house: House) -> None:
    async with house.raw() as (reader, writer):
        writer.write(b"GET /props?model=%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"404" in await reader.readline()


async def test_a_body_over_the_limit_is_refused_by_its_announcement(house: House) -> None:
    async with house.raw() as (reader, writer):
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100001\r\n\r\n"
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 413 ")
        assert "Connection: close" in head


async def test_a_body_without_announcement_is_refused_at_the_limit(house: House) -> None:
    async with house.raw() as (reader, writer):
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"186A1\r\n" + b"x" * 100_001 + b"\r\n"
        )
        assert b" 413 " in await reader.readline()


async def test_a_compressed_body_counts_by_what_it_becomes(house: House) -> None:
    body = aiohttp.BytesPayload(b" " * 100_001)
    async with house.http.post("/tokenize", data=body, compress=True) as response:
        assert response.status == 413


async def test_a_compressed_body_that_is_garbage_is_a_bad_request(house: House) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with house.http.post("/tokenize", data=b"garbage", headers=headers) as response:
        assert response.status == 400


async def test_a_form_says_its_model_in_a_field(house: House) -> None:
    fake = await house.fake()
    for name, status in (("chat", 200), ("nope", 404)):
        form = aiohttp.FormData({"model": name})
        form.add_field("file", b"RIFF", filename="a.wav", content_type="audio/wav")
        async with house.http.post("/v1/audio/transcriptions", data=form) as response:
            assert response.status == status
    call = await fake.calls.get()
    assert call.headers["Content-Type"].startswith("multipart/form-data; boundary=")


async def test_what_lies_too_deep_to_be_written_again_is_a_bad_request(house: House) -> None:
    fake = await house.fake()
    body = b'{"id_slot": 0, "a": ' + b"[" * 900 + b"]" * 900 + b"}"
    async with house.http.post("/tokenize", data=body) as response:
        assert response.status == 400
    assert fake.calls.empty()


async def test_a_body_that_does_not_come_to_its_end_in_time_is_given_up(house: House) -> None:
    await house.open(body_timeout_s=0.05)
    async with house.raw() as (reader, writer):
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 408 ")
    assert "Connection: close" in head


# Variants.

FIXED = Variant({"chat_template_kwargs": {"x": 1}, "top_k": 5}, {"seed": 7}, frozenset({"stop"}))


@pytest.fixture
def various(house: House) -> House:
    house.loader.cards = [replace(card("chat"), variants={"fixed": FIXED})]
    return house


async def test_a_variant_changes_what_the_instance_reads(various: House) -> None:
    fake = await various.fake()
    members: dict[str, Any] = {
        "model": "vendor/chat:fixed",
        "stop": "x",
        "seed": 1,
        "top_k": 9,
        "id_slot": 3,
    }
    async with various.ask(logprobs=True, **members) as response:
        assert response.status == 200
    read = orjson.loads((await fake.calls.get()).body)
    assert (read["top_k"], read["seed"], read["chat_template_kwargs"]) == (9, 7, {"x": 1})
    assert not {"stop", "id_slot"} & read.keys()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
async def test_a_variant_leaves_alone_what_generates_nothing(various: House, path: str) -> None:
    fake = await various.fake()
    body = b'{"model": "chat:fixed" }'
    async with various.http.post(path, data=body) as response:
        assert response.status == 200
    assert (await fake.calls.get()).body == body


async def test_the_prompt_of_a_variant_is_that_of_its_members(
    various: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Ask] = []
    lease = various.dispatch.lease

    def hear(ask: Ask, avoid: Any = ()) -> Any:
        asked.append(ask)
        return lease(ask, avoid)

    monkeypatch.setattr(various.dispatch, "lease", hear)
    await various.fake()
    for model in ("chat", "chat:fixed"):
        async with various.ask(model=model, logprobs=True) as response:
            assert response.status == 200
    plain, fixed = asked
    assert plain.model == fixed.model == "chat"
    assert plain.prompt == read_prompt(plain.kind, "chat", plain.members)
    assert fixed.prompt == read_prompt(fixed.kind, "chat", FIXED.applied(plain.members))


async def test_variants_are_listed_and_found(various: House) -> None:
    async with various.http.get("/v1/models") as response:
        assert [one["id"] for one in (await response.json())["data"]] == ["chat", "chat:fixed"]
    async with various.http.get("/v1/models/chat:fixed") as response:
        assert (await response.json())["context_length"] == 2048


async def test_a_variant_that_lies_too_deep_to_be_written_again_is_a_bad_request(
    various: House,
) -> None:
    body = b'{"model": "chat:fixed", "a": ' + b"[" * 900 + b"]" * 900 + b"}"
    async with various.http.post("/v1/chat/completions", data=body) as response:
        assert response.status == 400
