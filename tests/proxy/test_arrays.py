"""Arrays of prompts and several answers, behind the proxy and asked of the real engine itself."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from support import engine as engines
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from supervisor.builds.discover import Engine

TEXTS: Final = ["the cat", "in the", "a", "on the the cat"]
GREEDY: Final = {"model": "chat", "temperature": 0, "seed": 1}
# Members that differ between answers to the same request.
_VARYING: Final = frozenset({"id", "created", "timings", "id_slot", "logprob", "top_logprobs"})
# The prompts of an array find earlier prompts in the cache, in any order.
_CACHED: Final = frozenset({"tokens_cached", "prompt_tokens_details"})


@pytest.fixture(scope="module")
def sockets(engine: Engine, tiny_model: Path) -> Iterator[Mapping[str, Path]]:
    """Run three engines: for generation, for embeddings, for ranking."""
    # Without --kv-unified build 10434 gives wrong vectors for texts that it computes together, and
    # the scores of a model without a head for ranking depend on that too.
    options = ["-c", "4096", "-np", "2", "-t", "1", "--kv-unified"]
    with (
        engines.running(engine, tiny_model, *options) as text,
        engines.running(
            engine, tiny_model, *options, "--embeddings", "--pooling", "mean"
        ) as vector,
        engines.running(engine, tiny_model, *options, "-np", "1", "--reranking") as rank,
    ):
        yield {"text": text, "vector": vector, "rank": rank}


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyHarness]:
    async with AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="corral-") as directory:
            proxy = ProxyHarness(Path(directory), stack)
            await proxy.open()
            yield proxy


async def direct(socket: Path, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """Ask the engine itself."""
    async with (
        aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(socket)),
            headers={"Authorization": f"Bearer {engines.KEY}"},
        ) as session,
        session.post(path, json=body) as response,
    ):
        return response.status, await response.read()


async def both(
    proxy: ProxyHarness, socket: Path, path: str, body: Mapping[str, Any]
) -> tuple[tuple[int, bytes], tuple[int, bytes]]:
    """Ask the engine itself, and behind the proxy."""
    proxy.router.admit(engines.upstream(socket, 2))
    theirs = await direct(socket, path, body)
    async with proxy.http.post(path, json=body) as response:
        return theirs, (response.status, await response.read())


def same(said: object) -> object:
    """Return an answer without varying members, figures to 2 places: batches change the rest."""
    if isinstance(said, dict):
        left_out = _VARYING | _CACHED
        return {name: same(answer) for name, answer in said.items() if name not in left_out}
    if isinstance(said, list):
        return [same(answer) for answer in said]
    return round(said, 2) if isinstance(said, float) else said


@pytest.mark.parametrize(
    ("which", "path", "members"),
    [
        ("text", "/v1/completions", {"prompt": TEXTS, "max_tokens": 4}),
        ("text", "/v1/completions", {"prompt": [[260, 261], "a", [262, "b"]], "max_tokens": 4}),
        ("text", "/v1/completions", {"prompt": TEXTS, "max_tokens": 4, "n": 2}),
        ("text", "/v1/completions", {"prompt": TEXTS, "max_tokens": 4, "logprobs": 2}),
        ("text", "/v1/completions", {"prompt": ["a"], "max_tokens": 4}),
        ("text", "/v1/completions", {"prompt": [260, 261, 262], "max_tokens": 4}),
        ("text", "/completion", {"prompt": TEXTS, "n_predict": 4}),
        ("text", "/completions", {"prompt": TEXTS, "n_predict": 4, "n_cmpl": 2}),
        ("text", "/completion", {"prompt": TEXTS, "n_predict": 4, "n_probs": 2}),
        ("text", "/completion", {"prompt": TEXTS, "n_predict": 4, "response_fields": ["content"]}),
        ("text", "/completion", {"prompt": "a", "n_predict": 4, "n_cmpl": 2}),
        ("vector", "/v1/embeddings", {"input": TEXTS}),
        ("vector", "/v1/embeddings", {"input": [[260, 261], "a"]}),
        ("vector", "/embedding", {"content": TEXTS}),
        ("vector", "/embeddings", {"input": TEXTS, "embd_normalize": -1}),
        ("rank", "/v1/rerank", {"query": "cat", "documents": TEXTS}),
        ("rank", "/rerank", {"query": "cat", "documents": TEXTS, "top_n": 2}),
        ("rank", "/rerank", {"query": "cat", "documents": TEXTS, "top_n": "2"}),
        ("rank", "/reranking", {"query": "cat", "texts": TEXTS, "return_text": True}),
    ],
)
async def test_an_array_of_prompts_is_answered_as_the_engine_answers_it(
    proxy: ProxyHarness,
    sockets: Mapping[str, Path],
    which: str,
    path: str,
    members: Mapping[str, Any],
) -> None:
    theirs, ours = await both(proxy, sockets[which], path, {**GREEDY, **members})
    assert (theirs[0], ours[0]) == (200, 200)
    assert same(json.loads(ours[1])) == same(json.loads(theirs[1]))


async def test_base64_is_gathered_too(proxy: ProxyHarness, sockets: Mapping[str, Path]) -> None:
    members = {"input": TEXTS, "encoding_format": "base64"}
    found = await both(proxy, sockets["vector"], "/v1/embeddings", {**GREEDY, **members})
    lengths = [[len(entry["embedding"]) for entry in json.loads(said)["data"]] for _, said in found]
    assert lengths[0] == lengths[1]
    assert {entry["encoding_format"] for entry in json.loads(found[1][1])["data"]} == {"base64"}


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", {"prompt": TEXTS, "max_tokens": 4}),
        ("/v1/completions", {"prompt": TEXTS, "max_tokens": 4, "n": 2}),
        ("/completion", {"prompt": TEXTS, "n_predict": 4}),
    ],
)
async def test_a_stream_of_several_prompts_equals_the_engines_own(
    proxy: ProxyHarness, sockets: Mapping[str, Path], path: str, members: Mapping[str, Any]
) -> None:
    body = {**GREEDY, **members, "stream": True}
    theirs, ours = await both(proxy, sockets["text"], path, body)
    assert texts_of(ours[1]) == texts_of(theirs[1])
    assert ours[1].count(b"[DONE]") == theirs[1].count(b"[DONE]")
    ids = {piece["id"] for piece in pieces_of(ours[1]) if "id" in piece}
    assert len(ids) <= 1


def pieces_of(stream: bytes) -> list[dict[str, Any]]:
    said = (event.removeprefix(b"data: ") for event in stream.split(b"\n\n"))
    found = [json.loads(answer) for answer in said if answer.startswith(b"{")]
    return [entry for entry in found if isinstance(entry, dict)]


def texts_of(stream: bytes) -> dict[int, str]:
    """Return the text of each answer of a stream, by its number."""
    texts: dict[int, str] = {}
    for piece in pieces_of(stream):
        for entry in piece.get("choices", [piece]):
            said = entry.get("text", entry.get("content"))
            texts[entry["index"]] = texts.get(entry["index"], "") + said
    return texts


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_prompt_is_the_answer(
    proxy: ProxyHarness, sockets: Mapping[str, Path], *, stream: bool
) -> None:
    body = {**GREEDY, "prompt": ["a", "the " * 9000, "b"], "max_tokens": 4, "stream": stream}
    theirs, ours = await both(proxy, sockets["text"], "/v1/completions", body)
    assert theirs[0] == 400 or stream
    assert b"exceed" in ours[1]
    assert stream or ours[0] == 400
    await until(lambda: not proxy.router.count_in_flight("chat.1"))


async def test_prompts_the_engine_refuses_are_refused_in_its_words(
    proxy: ProxyHarness, sockets: Mapping[str, Path]
) -> None:
    body = {**GREEDY, "prompt": ["a", None], "max_tokens": 4}
    theirs, ours = await both(proxy, sockets["text"], "/v1/completions", body)
    assert (theirs[0], ours[0]) == (400, 400)
    assert json.loads(theirs[1])["error"]["message"] == json.loads(ours[1])["error"]["message"]
    async with proxy.http.post(
        "/v1/rerank", json={"model": "chat", "query": "a", "documents": ["a", "b"], "top_n": -1}
    ) as response:
        assert response.status == 400


async def test_a_client_that_leaves_cancels_all_prompts(
    proxy: ProxyHarness, sockets: Mapping[str, Path]
) -> None:
    proxy.router.admit(engines.upstream(sockets["text"], 2))
    body = {**GREEDY, "prompt": TEXTS * 10, "max_tokens": 1500, "ignore_eos": True}

    async def ask() -> None:
        async with proxy.http.post("/v1/completions", json=body) as response:
            await response.read()

    async with asyncio.timeout(PATIENCE_S):
        asking = asyncio.get_running_loop().create_task(ask())
        await until(lambda: proxy.router.count_in_flight("chat.1") == 2)
        asking.cancel()
        await until(lambda: not proxy.router.instances()[0].leases)
    (event,) = proxy.events("request.finished")
    assert event["status"] == 499


async def test_an_array_of_a_thousand_takes_one_place_in_line_and_is_not_refused(
    proxy: ProxyHarness, sockets: Mapping[str, Path]
) -> None:
    await proxy.open(queue_max=1)
    proxy.router.admit(engines.upstream(sockets["vector"], 2))
    most = 0

    async def ask() -> bytes:
        body = {"model": "chat", "input": ["a"] * 1000}
        async with proxy.http.post("/v1/embeddings", json=body) as response:
            assert response.status == 200
            return await response.read()

    async with asyncio.timeout(60):
        asking = asyncio.get_running_loop().create_task(ask())
        while not asking.done():
            most = max(most, proxy.router.demand("chat").waiting)
            await asyncio.sleep(0)
    answer = json.loads(asking.result())
    assert [entry["index"] for entry in answer["data"]] == list(range(1000))
    assert most == 1
    (event,) = proxy.events("request.finished")
    assert (event["status"], event["attempts"]) == (200, 1)


async def test_who_asks_beside_an_array_waits_for_one_prompt_and_not_for_all(
    proxy: ProxyHarness,
) -> None:
    """The instance answers one call after the other, in the order in which they come."""
    order: list[bytes] = []

    async def answer(call: Call) -> None:
        order.append(call.body)
        await may_go_on.wait()
        text = b'{"content":"x","index":0,"stop":true}'
        await call.head("Content-Type: application/json", f"Content-Length: {len(text)}")
        await call.send(text)

    may_go_on = asyncio.Event()
    fake = await proxy.fake(answer, is_admitted=False)
    proxy.router.admit(fake.upstream(slots=1))
    many = {"prompt": [f"many {number}" for number in range(9)], "n_probs": 1}

    async def ask(body: dict[str, Any]) -> int:
        async with proxy.http.post("/completion", json=body) as response:
            await response.read()
            return response.status

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(many))]
        await until(lambda: len(order) == 1 and proxy.router.demand("chat").waiting == 1)
        asked.append(group.create_task(ask({"prompt": "one", "n_probs": 1})))
        await until(lambda: proxy.router.demand("chat").waiting == 2)
        may_go_on.set()
    assert [task.result() for task in asked] == [200, 200]
    assert [b"one" in body for body in order].index(True) <= 2
