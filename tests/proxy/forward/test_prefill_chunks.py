"""A long prompt is computed in chunks beside running streams, and never fails because of that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.save_policy import Transfer

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LONG = "words " * 400
TOKENS = 400
CHUNKS = [32, 132, 232, 332]  # the least first, then the tokens that it computes in 150 ms
SLOT = 2
JSON_FIELD = "Content-Type: application/json"
DIVIDED = {"messages": [{"role": "user", "content": LONG}], "logprobs": True}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@dataclass
class Engine:
    """Streams for ever to who asks for a stream; `status` and `cached` are those of chunks."""

    status: str = "200 OK"
    loses_cache: bool = False
    hangs: bool = False
    drops: int = 0
    n_ctx: int = TOKENS + 1
    has_template: bool = True
    counts: int = 0  # Tokens that it makes of a request of Anthropic's API.
    is_dry: bool = False  # Its chunks are answered without figures.
    chunks: list[Mapping[str, Any]] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    _cached: int = 0
    _streams: int = 0

    async def answer(self, call: Call) -> None:
        path = call.line.split()[1]
        body = json.loads(call.body or b"{}")
        if path == "/slots":
            await _say(call, [{"is_processing": self._streams > 0, "n_ctx": self.n_ctx}])
        elif path == "/apply-template":
            contents = [message["content"] for message in body["messages"]]
            await _say(call, {"prompt": " ".join(contents)} if self.has_template else {})
        elif path == "/v1/messages/count_tokens":
            await _say(call, {"input_tokens": self.counts})
        elif path == "/tokenize":
            await _say(call, {"tokens": [len(word) for word in body["content"].split()]})
        elif path == "/completion" and body["prompt"] == [[]]:
            self.refreshed.append(body["id_slot"])
            await _say(call, {})
        elif path == "/completion":
            await self._chunk(call, body)
        elif body.get("stream"):
            self._streams += 1
            await call.begin_stream()
            await call.chunk(TOKEN)
            await call.until_left()
            self._streams -= 1
        else:
            self.requests.append(body)
            timings = {"cache_n": self._cached, "prompt_n": TOKENS - self._cached, "prompt_ms": 9}
            choice = {"index": 0, "message": {"role": "assistant", "content": "a"}}
            await _say(call, {"choices": [choice], "timings": timings})

    async def _chunk(self, call: Call, body: Mapping[str, Any]) -> None:
        self.chunks.append(body)
        if self.drops:
            self.drops -= 1
            call.drop()
            return
        if self.hangs:
            await call.until_left()
            self.left.set()
            return
        count = len(body["prompt"])
        found = 0 if self.loses_cache else self._cached
        self._cached = count
        timings = {"cache_n": found, "prompt_n": count - found, "prompt_ms": (count - found) * 1.5}
        answer = {} if self.is_dry else {"id_slot": SLOT, "timings": timings}
        if not body.get("stream"):
            await _say(call, answer, self.status)
            return
        await call.begin_stream()
        progress = {"total": count, "cache": found, "processed": count, "time_ms": 9}
        for piece in ({"prompt_progress": progress}, answer):
            await call.chunk(b"data: %s\n\n" % json.dumps(piece).encode())
        await call.end()


async def _say(call: Call, members: object, status: str = "200 OK") -> None:
    body = json.dumps(members).encode()
    await call.head(JSON_FIELD, f"Content-Length: {len(body)}", status=status)
    await call.send(body)


@asynccontextmanager
async def streaming(proxy: ProxyHarness, engine: Engine) -> AsyncIterator[None]:
    """Have a stream run on an instance that prefers pure decode."""
    fake = await proxy.fake(engine.answer, is_admitted=False)
    fake.says_slots = False
    upstream = replace(fake.upstream(slots=4), can_name_slots=True, prefer_pure_decode=True)
    proxy.router.admit(upstream)
    async with proxy.ask(stream=True) as response:
        assert await response.content.readuntil(b"\n\n") == TOKEN
        yield


async def ask(proxy: ProxyHarness, **members: Any) -> int:
    async with proxy.ask(**members) as response:
        await response.read()
        return response.status


def sizes(chunks: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(chunk["prompt"]) for chunk in chunks]


async def test_a_prompt_grows_by_chunks_in_the_slot_that_the_request_then_names(
    proxy: ProxyHarness,
) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    engine = Engine()
    async with streaming(proxy, engine):
        assert await ask(proxy, **DIVIDED) == 200
    assert sizes(engine.chunks) == CHUNKS
    assert [chunk.get("id_slot") for chunk in engine.chunks] == [None] + 3 * [SLOT]
    (request,) = engine.requests
    assert (request["id_slot"], request["messages"]) == (SLOT, DIVIDED["messages"])


async def test_what_chunks_computed_counts_as_computed(proxy: ProxyHarness) -> None:
    engine = Engine()
    async with streaming(proxy, engine):
        await ask(proxy, **DIVIDED)
        await until(lambda: bool(proxy.events("request.finished")))
    (finished,) = proxy.events("request.finished")
    assert (finished["cached_tokens"], finished["prompt_tokens"]) == (0, TOKENS)


async def test_without_a_stream_beside_it_a_prompt_is_sent_at_once(proxy: ProxyHarness) -> None:
    engine = Engine()
    async with streaming(proxy, engine):
        pass
    await until(lambda: not any(instance.leases for instance in proxy.router.instances()))
    await ask(proxy, **DIVIDED)
    assert not engine.chunks


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]}]},
        {"messages": [{"role": "user", "content": "a short one"}]},
        {"cache_prompt": False},
        {"n": 2},
        {"lora": [{"id": 0, "scale": 0.5}]},
    ],
)
async def test_other_requests_are_sent_as_they_are(
    proxy: ProxyHarness, members: Mapping[str, Any]
) -> None:
    engine = Engine()
    async with streaming(proxy, engine):
        assert await ask(proxy, **{**DIVIDED, **members}) == 200
    assert not engine.chunks


async def test_a_prompt_that_the_engine_refuses_for_its_length_is_sent_at_once(
    proxy: ProxyHarness,
) -> None:
    engine = Engine(n_ctx=TOKENS)
    async with streaming(proxy, engine):
        await ask(proxy, **DIVIDED)
    assert not engine.chunks


@pytest.mark.parametrize(
    ("engine", "count"), [(Engine(status="500 Error"), 1), (Engine(loses_cache=True), 2)]
)
async def test_chunks_that_do_not_help_end_and_the_request_is_sent(
    proxy: ProxyHarness, engine: Engine, count: int
) -> None:
    async with streaming(proxy, engine):
        assert await ask(proxy, **DIVIDED) == 200
    assert len(engine.chunks) == count
    assert len(engine.requests) == 1


async def test_a_chunk_whose_connection_closes_is_a_request_that_is_tried_once_more(
    proxy: ProxyHarness,
) -> None:
    engine = Engine(drops=1)
    async with streaming(proxy, engine):
        assert await ask(proxy, **DIVIDED) == 200
    assert sizes(engine.chunks) == CHUNKS[:1]
    assert "id_slot" not in engine.requests[0]


async def test_a_client_that_leaves_ends_the_chunks_and_frees_the_slot(proxy: ProxyHarness) -> None:
    engine = Engine(hangs=True)
    async with streaming(proxy, engine), asyncio.TaskGroup() as group:
        client = group.create_task(ask(proxy, **DIVIDED))
        await until(lambda: bool(engine.chunks))
        client.cancel()
        await engine.left.wait()
        await until(lambda: [len(instance.leases) for instance in proxy.router.instances()] == [1])
    assert len(engine.chunks) == 1


async def test_the_end_of_all_streams_ends_the_chunks(proxy: ProxyHarness) -> None:
    engine = Engine()
    async with asyncio.TaskGroup() as group, streaming(proxy, engine):
        client = group.create_task(ask(proxy, **DIVIDED))
        await until(lambda: bool(engine.chunks))
    assert await client == 200
    assert len(engine.chunks) < len(CHUNKS)
    assert engine.requests[0]["id_slot"] == SLOT


async def test_two_prompts_take_turns(proxy: ProxyHarness) -> None:
    engine = Engine()
    async with streaming(proxy, engine), asyncio.TaskGroup() as group:
        instance = proxy.router.registry.get("chat.1")
        assert instance
        async with instance.chunk_turn:
            client = group.create_task(ask(proxy, **DIVIDED))
            await until(lambda: len(instance.leases) == 2)
            await proxy.send()
            assert not engine.chunks
        assert await client == 200
    assert sizes(engine.chunks) == CHUNKS


async def test_another_request_does_not_take_the_slot_between_two_chunks(
    proxy: ProxyHarness,
) -> None:
    engine = Engine()
    async with asyncio.TaskGroup() as group, streaming(proxy, engine):
        client = group.create_task(ask(proxy, **DIVIDED))
        await until(lambda: any(lease.is_paused for lease in leases(proxy)))
        assert await ask(proxy, logprobs=True, messages=[{"role": "user", "content": "new"}]) == 200
        assert engine.refreshed == [SLOT]
        assert await client == 200


def leases(proxy: ProxyHarness) -> Sequence[Any]:
    instance = proxy.router.registry.get("chat.1")
    return instance.leases if instance else ()


BEGUN = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "how so"}]}


@dataclass
class Storage:
    """Saves slots, unless it `fails`."""

    fails: bool = False
    saved: list[tuple[int, int, int]] = field(default_factory=list)

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return True

    async def save(
        self, _instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        assert not fingerprint.turn_hashes
        self.saved.append((id_slot, tokens, len(fingerprint.blocks)))
        return None if self.fails else Transfer(tokens, 1000 * tokens, 0.01)

    async def restore(self, _instance: str, _slot: int, _name: str, /) -> Transfer | None:
        return None

    async def look(self, _instance: str, /) -> None:
        return


async def begin(proxy: ProxyHarness, engine: Engine, storage: Storage) -> None:
    """Admit two instances that can use each other's slot files."""
    for name in ("chat.1", "chat.2"):
        fake = await proxy.fake(engine.answer, name, is_admitted=False)
        fake.says_slots = False
        upstream = replace(
            fake.upstream(slots=4), can_name_slots=True, cache_key="key", token_bytes=1000.0
        )
        proxy.router.admit(upstream, (), storage)


async def test_a_beginning_is_computed_first_and_saved_and_the_request_goes_on_in_its_slot(
    proxy: ProxyHarness,
) -> None:
    engine, storage = Engine(), Storage()
    await begin(proxy, engine, storage)
    assert await ask(proxy, **BEGUN, logprobs=True) == 200
    assert sizes(engine.chunks) == [TOKENS]
    blocks = len(LONG.strip()) // 64
    assert storage.saved == [(SLOT, TOKENS, blocks)]
    (request,) = engine.requests
    assert (request["id_slot"], request["messages"]) == (SLOT, BEGUN["messages"])
    await until(lambda: bool(proxy.events("request.finished")))
    (finished,) = proxy.events("request.finished")
    assert (finished["cached_tokens"], finished["prompt_tokens"]) == (0, TOKENS)


async def test_a_request_that_cannot_name_the_slot_of_its_beginning_is_aimed_at_it(
    proxy: ProxyHarness,
) -> None:
    engine, storage = Engine(counts=TOKENS + 2), Storage()
    await begin(proxy, engine, storage)
    await ask_messages(proxy)
    assert sizes(engine.chunks) == [TOKENS]
    assert [id_slot for id_slot, *_ in storage.saved] == [SLOT]
    assert sorted(engine.refreshed) == [0, 1, 3]
    (request,) = engine.requests
    assert "id_slot" not in request


async def test_no_beginning_is_computed_of_a_request_that_the_build_translates_in_another_way(
    proxy: ProxyHarness,
) -> None:
    engine, storage = Engine(counts=TOKENS + 9), Storage()
    await begin(proxy, engine, storage)
    await ask_messages(proxy)
    assert not engine.chunks
    assert not storage.saved


async def ask_messages(proxy: ProxyHarness) -> None:
    user = {"role": "user", "content": "how so"}
    members = {"model": "chat", "system": LONG, "messages": [user], "verbose": True}
    async with proxy.http.post("/v1/messages", json=members) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("engine", "storage", "chunks"),
    [
        pytest.param(Engine(has_template=False), Storage(), 0, id="no tokens of the prompt"),
        pytest.param(Engine(is_dry=True), Storage(), 1, id="an answer without figures"),
        pytest.param(Engine(), Storage(fails=True), 1, id="no file"),
        pytest.param(Engine(drops=1), Storage(), 2, id="a closed connection: one retry"),
    ],
)
async def test_a_beginning_that_cannot_be_saved_costs_no_request(
    proxy: ProxyHarness, engine: Engine, storage: Storage, chunks: int
) -> None:
    await begin(proxy, engine, storage)
    assert await ask(proxy, **BEGUN, logprobs=True) == 200
    assert len(engine.chunks) == chunks
    assert len(engine.requests) == 1


async def test_a_client_that_leaves_ends_its_beginning(proxy: ProxyHarness) -> None:
    engine, storage = Engine(hangs=True), Storage()
    await begin(proxy, engine, storage)
    async with asyncio.TaskGroup() as group:
        client = group.create_task(ask(proxy, **BEGUN))
        await until(lambda: bool(engine.chunks))
        client.cancel()
        await engine.left.wait()
        await until(lambda: not any(instance.leases for instance in proxy.router.instances()))
    assert not storage.saved
