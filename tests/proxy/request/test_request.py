"""Bodies of requests, and the models that they name."""

import asyncio
import gzip
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from support.proxy_harness import ProxyHarness, model_info
from support.upstream import Call, say_ok

from proxy.cache.prompt import read_prompt
from proxy.cache.prompt_rules import PromptRules
from proxy.http.body import Share
from proxy.http.forms import Part, read_form
from proxy.request.request import ProxyRequest
from proxy.request.variants import Variant
from proxy.settings import ProxySettings

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
async def test_a_body_that_is_no_request_is_a_bad_request(proxy: ProxyHarness, body: bytes) -> None:
    await proxy.open(max_body_bytes=2_000_000)
    fake = await proxy.fake()
    async with proxy.http.post("/v1/chat/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert fake.calls.empty()


async def test_of_a_member_given_twice_the_last_counts(proxy: ProxyHarness) -> None:
    await proxy.fake()
    body = b'{"model": "nope", "model": "chat"}'
    async with proxy.http.post("/tokenize", data=body) as response:
        assert response.status == 200


@pytest.mark.parametrize("name", ["\N{SNOWMAN}", "a\nb", "x" * 5000, "%ff", "../../etc"])
async def test_a_strange_model_name_is_just_an_unknown_one(proxy: ProxyHarness, name: str) -> None:
    async with proxy.http.get("/props", params={"model": name}) as response:
        assert response.status == 404
        assert len((await response.json())["error"]["message"]) < 1000


async def test_a_query_that_is_not_utf_8_is_an_unknown_model_too(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(b"GET /props?model=%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"404" in await reader.readline()


async def test_a_body_over_the_limit_is_refused_by_its_announcement(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100001\r\n\r\n"
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 413 ")
        assert "Connection: close" in head


async def test_a_body_without_announcement_is_refused_at_the_limit(proxy: ProxyHarness) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"186A1\r\n" + b"x" * 100_001 + b"\r\n"
        )
        assert b" 413 " in await reader.readline()


async def test_a_compressed_body_counts_by_its_decompressed_size(proxy: ProxyHarness) -> None:
    body = aiohttp.BytesPayload(b" " * 100_001)
    async with proxy.http.post("/tokenize", data=body, compress=True) as response:
        assert response.status == 413


async def test_a_compressed_body_that_is_garbage_is_a_bad_request(proxy: ProxyHarness) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with proxy.http.post("/tokenize", data=b"garbage", headers=headers) as response:
        assert response.status == 400


async def test_a_form_says_its_model_in_a_field(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    for name, status in (("chat", 200), ("nope", 404)):
        form = aiohttp.FormData({"model": name})
        form.add_field("file", b"RIFF", filename="a.wav", content_type="audio/wav")
        async with proxy.http.post("/v1/audio/transcriptions", data=form) as response:
            assert response.status == status
    call = await fake.calls.get()
    assert call.headers["Content-Type"].startswith("multipart/form-data; boundary=")


async def test_what_lies_too_deep_to_be_written_again_is_a_bad_request(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    body = b'{"id_slot": 0, "a": ' + b"[" * 900 + b"]" * 900 + b"}"
    async with proxy.http.post("/tokenize", data=body) as response:
        assert response.status == 400
    assert fake.calls.empty()


# An engine reads the same values that were checked.

PINNED = b'{"model": "chat", "id_slot": 1, "seed": 1}'


@pytest.mark.parametrize("path", ["/completion", "/v1/embeddings", "/v1/audio/transcriptions"])
@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/mixed",
        "multipart/mixed; boundary=x",
        "multipart/form-data-x; boundary=x",
        "application/json; charset=utf-16",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/mixed, multipart/form-data; boundary=x",
    ],
)
async def test_a_body_that_is_no_form_is_json_with_any_content_type(
    proxy: ProxyHarness, path: str, content_type: str
) -> None:
    fake = await proxy.fake()
    headers = {"Content-Type": content_type}
    async with proxy.http.post(path, data=PINNED, headers=headers) as response:
        assert response.status == 200
    call = await fake.calls.get()
    assert call.headers["Content-Type"] == "application/json"
    assert b"id_slot" not in call.body


async def test_a_form_on_a_page_that_takes_none_is_no_json(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    form = aiohttp.FormData({"model": "chat", "prompt": "hello"}, default_to_multipart=True)
    async with proxy.http.post("/v1/chat/completions", data=form) as response:
        assert response.status == 400
    assert fake.calls.empty()


async def test_of_two_content_types_an_engine_sees_one(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.raw() as (reader, writer):
        writer.write(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(PINNED), PINNED)
        )
        answered = (await reader.readline()).split()[1]
    if answered != b"400":
        call = await fake.calls.get()
        assert call.headers["Content-Type"] == "application/json"
        assert b"id_slot" not in call.body


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "chat", "id\\u005fslot": 1}',
        b'{"id_slot": 0, "model": "chat", "id_slot": 1}',
        b'{"model": "chat", "id_slot": null}',
    ],
)
async def test_no_way_to_write_it_brings_a_slot_to_an_engine(
    proxy: ProxyHarness, body: bytes
) -> None:
    fake = await proxy.fake()
    async with proxy.http.post("/completion", data=body) as response:
        assert response.status == 200
    assert "id_slot" not in orjson.loads((await fake.calls.get()).body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param('{"model": "chat"}'.encode("utf-16"), id="UTF-16"),
        pytest.param('{"model": "chat"}'.encode("utf-8-sig"), id="byte order mark"),
        pytest.param(b'{"model": "chat"} {"id_slot": 1}', id="two objects"),
        pytest.param(b'{"model": "chat"}\x00', id="a NUL behind it"),
        pytest.param(b'{"model": "chat", /* */ "a": 1}', id="comment"),
        pytest.param(b'{"model": "chat", "a": Infinity}', id="Infinity"),
        pytest.param(b"--x\r\n", id="a form"),
    ],
)
async def test_what_only_some_parsers_take_is_a_bad_request(
    proxy: ProxyHarness, body: bytes
) -> None:
    fake = await proxy.fake()
    headers = {"Content-Type": "multipart/mixed; boundary=x"}
    async with proxy.http.post("/completion", data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert fake.calls.empty()


async def test_a_form_reaches_an_engine_as_it_was_read(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    form = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\nX-Y: z\r\n\r\nchat\r\n'
        b'--x\r\nContent-Disposition: form-data; name="id_slot"\r\n\r\n1\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
        b'--x--\r\nContent-Disposition: form-data; name="model"\r\n\r\nnope\r\n--x--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    path = "/v1/audio/transcriptions"
    async with proxy.http.post(path, data=form, headers=headers) as response:
        assert response.status == 200
    call = await fake.calls.get()
    read = await read_form(call.headers["Content-Type"], call.body)
    assert read.parts == (
        Part("model", b"chat"),
        Part("file", b"RIFF", "a.wav", "application/octet-stream"),
    )
    assert b"nope" not in call.body


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=y"])
async def test_a_malformed_form_is_a_bad_request(proxy: ProxyHarness, content_type: str) -> None:
    fake = await proxy.fake()
    headers, path = {"Content-Type": content_type}, "/v1/audio/transcriptions"
    async with proxy.http.post(path, data=b"--x\r\n", headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert fake.calls.empty()


# Changes of a body.

HOSTILE = {
    "text": b'{"prompt": "%s"}' % (b"hello world " * 1_300_000),
    "escapes": b'{"stream": false, "prompt": "%s"}' % (b'\\"' * 8_000_000),
    "tokens": b'{"prompt": [%s1]}' % (b"12345," * 490_000),
    "too many": b'{"prompt": [%s1]}' % (b"1," * 8_000_000),
    "lists": b'{"prompt": [%s1]}' % (b"[]," * 54_000),
    "objects": b'{"a": [%s1]}' % (b'{"":1},' * 40_000),
    "names": b'{%s"prompt": 1}' % b"".join(b'"%d":1,' % number for number in range(160_000)),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=list(HOSTILE))
async def test_other_requests_have_their_turn_beside_any_body(
    proxy: ProxyHarness, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All work that grows with a large body is done in a thread."""
    threads: set[threading.Thread] = set()
    run = Share.run

    async def noted(share: Share, size_bytes: int, work: Callable[[], Any]) -> Any:
        def note() -> Any:
            threads.add(threading.current_thread())
            return work()

        return await run(share, size_bytes, note)

    monkeypatch.setattr(Share, "run", noted)
    await proxy.open(max_body_bytes=ProxySettings().max_body_bytes)
    await proxy.fake()
    assert await status_of(proxy, body) in {200, 400}
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/chat/completions", "/corral/v1/models/chat/warm"]
)
@pytest.mark.parametrize(
    ("body", "setting"),
    [
        pytest.param(b'{"a": %s}' % (b"[" * 250 + b"]" * 250), "max_body_depth", id="deep"),
        pytest.param(b'{"a": [%s1]}' % (b"1," * 2000), "max_body_values", id="values"),
        pytest.param(b'{"a": [%s1]}' % (b"[]," * 500), "max_body_values", id="lists"),
    ],
)
async def test_a_body_that_is_too_complex_is_a_bad_request(
    proxy: ProxyHarness, path: str, body: bytes, setting: str
) -> None:
    await proxy.open(max_body_values=2000)
    fake = await proxy.fake()
    async with proxy.http.post(path, data=body) as response:
        assert response.status == 400
        assert setting in (await response.json())["error"]["message"]
    assert fake.calls.empty()


async def test_a_prompt_of_128_thousand_tokens_passes_byte_for_byte(proxy: ProxyHarness) -> None:
    await proxy.open(max_body_bytes=ProxySettings().max_body_bytes)
    fake = await proxy.fake()
    body = orjson.dumps({"model": "chat", "content": "", "tokens": list(range(131_072))})
    async with proxy.http.post("/detokenize", data=gzip.compress(body), headers=GZIP) as response:
        assert response.status == 200
    assert (await fake.calls.get()).body == body


GZIP = {"Content-Encoding": "gzip"}


async def test_a_bomb_is_refused_and_names_the_limit(proxy: ProxyHarness) -> None:
    await proxy.open(max_body_bytes=100_000_000)
    bomb = gzip.compress(b'{"model": "chat", "prompt": [' + b"1," * 30_000_000 + b"1]}")
    async with proxy.http.post("/completion", data=bomb, headers=GZIP) as response:
        assert response.status == 413
        assert "max_body_ratio" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
async def test_an_unknown_coding_is_refused_with_those_that_are_known(
    proxy: ProxyHarness, coding: str
) -> None:
    headers = {"Content-Encoding": coding}
    async with proxy.http.post("/tokenize", data=b"{}", headers=headers) as response:
        assert response.status == 415
        assert response.headers["Accept-Encoding"] == "gzip, deflate"


async def test_an_unread_body_is_not_decompressed(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zlib.decompressobj", None)
    headers = {"Content-Encoding": "gzip"}
    async with proxy.http.post("/nowhere", data=b"garbage", headers=headers) as response:
        assert response.status == 404


async def test_bodies_that_take_too_much_memory_together_are_refused_until_one_ends(
    proxy: ProxyHarness,
) -> None:
    await proxy.open(body_memory_bytes=300_000)
    may_end = asyncio.Event()

    async def wait(call: Call) -> None:
        await may_end.wait()
        await say_ok(call)

    fake = await proxy.fake(wait)
    body = b'{"model": "chat", "content": "%s"}' % (b"a" * 50_000)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(status_of(proxy, body))
        await fake.calls.get()
        async with proxy.http.post("/tokenize", data=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert "body_memory_bytes" in (await response.json())["error"]["message"]
        may_end.set()
    assert first.result() == 200
    assert await status_of(proxy, body) == 200


async def status_of(proxy: ProxyHarness, body: bytes) -> int:
    async with proxy.http.post("/completion", data=io.BytesIO(body)) as response:
        return response.status


async def test_a_body_that_does_not_come_to_its_end_in_time_is_given_up(
    proxy: ProxyHarness,
) -> None:
    await proxy.open(body_timeout_s=0.05)
    async with proxy.raw() as (reader, writer):
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 408 ")
    assert "Connection: close" in head


# Variants.

FIXED = Variant(chat_template_kwargs={"x": 1}, top_k=5, set={"seed": 7}, strip=("stop",))


@pytest.fixture
def various(proxy: ProxyHarness) -> ProxyHarness:
    proxy.loader.model_infos = [replace(model_info("chat"), variants={"fixed": FIXED})]
    return proxy


async def test_a_variant_changes_the_members_that_the_instance_reads(various: ProxyHarness) -> None:
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


@pytest.mark.parametrize(
    "path",
    ["/apply-template", "/v1/messages/count_tokens", "/v1/chat/completions/input_tokens"],
)
async def test_a_variant_changes_a_prompt_that_is_rendered_or_counted(
    various: ProxyHarness, path: str
) -> None:
    fake = await various.fake()
    async with various.ask(path, model="chat:fixed") as response:
        assert response.status == 200
    read = orjson.loads((await fake.calls.get()).body)
    assert read["chat_template_kwargs"] == {"x": 1}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
async def test_a_variant_does_not_change_requests_that_generate_nothing(
    various: ProxyHarness, path: str
) -> None:
    fake = await various.fake()
    body = b'{"model": "chat:fixed" }'
    async with various.http.post(path, data=body) as response:
        assert response.status == 200
    assert (await fake.calls.get()).body == body


async def test_the_prompt_of_a_variant_is_that_of_its_members(
    various: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ProxyRequest] = []
    lease = various.router.lease

    def hear(ask: ProxyRequest, *options: Any) -> Any:
        asked.append(ask)
        return lease(ask, *options)

    monkeypatch.setattr(various.router, "lease", hear)
    await various.fake()
    for model in ("chat", "chat:fixed"):
        async with various.ask(model=model, logprobs=True) as response:
            assert response.status == 200
    plain, fixed = asked
    assert plain.model == fixed.model == "chat"
    assert plain.prompt == read_prompt(plain.kind, "chat", plain.json)
    assert fixed.prompt == read_prompt(fixed.kind, "chat", FIXED.apply_to(plain.json))


async def test_variants_are_listed_and_found(various: ProxyHarness) -> None:
    async with various.http.get("/v1/models") as response:
        assert [entry["id"] for entry in (await response.json())["data"]] == ["chat", "chat:fixed"]
    async with various.http.get("/v1/models/chat:fixed") as response:
        assert (await response.json())["context_length"] == 2048


async def test_a_variant_that_lies_too_deep_to_be_written_again_is_a_bad_request(
    various: ProxyHarness,
) -> None:
    body = b'{"model": "chat:fixed", "a": ' + b"[" * 900 + b"]" * 900 + b"}"
    async with various.http.post("/v1/chat/completions", data=body) as response:
        assert response.status == 400


DATED = "You help.\nToday's date: Tue Nov 24 2026\nAnswer briefly."
MOVED = "You help.\nAnswer briefly.\nToday's date: Tue Nov 24 2026"
EDITOR = {"User-Agent": "editor/1.2 (linux)"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": DATED}]}),
        ("/v1/messages", {"system": DATED, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"instructions": DATED, "input": "hi", "store": False}),
    ],
)
async def test_prompt_rules_change_the_prompts_of_their_client_alone(
    proxy: ProxyHarness, path: str, body: dict[str, Any]
) -> None:
    proxy.loader.prompt_rules = PromptRules({"editor": ("move:date", "move:path")})
    fake = await proxy.fake()
    body = {**body, "model": "chat", "max_tokens": 8}
    for headers, text in (({}, DATED), (EDITOR, MOVED)):
        async with proxy.http.post(path, json=body, headers=headers) as response:
            await response.read()
        assert orjson.dumps(text)[1:-1] in (await fake.calls.get()).body
    plain, ruled = proxy.events("request.finished")
    assert (plain["rules"], ruled["rules"]) == (None, "move:date")
    async with proxy.http.get("/metrics") as metrics:
        line = 'corral_prompts_changed_total{model="chat",rule="move:date"} 1.0'
        assert line in await metrics.text()
