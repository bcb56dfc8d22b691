"""What a body may be, and which model it means."""

import aiohttp
import pytest
from fakes.house import House

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
