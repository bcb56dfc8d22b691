"""Facts that a client could learn of another: it guesses prompts, deletes, reuses ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support import tiny_bert
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness, until
from support.requests import ask, upstream
from support.upstream import Call

from proxy.cache.fingerprint import RestoredSlot
from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import CacheOwner, Prompt, read_prompt
from proxy.cache.slot_map import SlotOwners
from proxy.common.headers import CACHE_OWNER
from proxy.observe.explanation import own_figures
from proxy.router.router import Router
from proxy.upstream.client import fetch, get_request
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import plain_values
from proxy.upstream.upstream import Node, Upstream
from supervisor.builds.discover import Engine

KEYS = """
[keys.anna]
key = "corral-anna-1234"
[keys.ben]
key = "corral-ben-12345"
[keys.root]
key = "corral-root-1234"
admin = true
"""
ANNA = {"Authorization": "Bearer corral-anna-1234"}
BEN = {"Authorization": "Bearer corral-ben-12345"}
ROOT = {"Authorization": "Bearer corral-root-1234"}
TEXT = "the cat sat on the mat and the dog saw that the code is "
# 480 tokens, the last of them a secret.
SECRET = TEXT * 12 + "4711"
FEW_TOKENS = 40


@pytest.fixture(scope="module")
def socket(engine: Engine, tiny_model: Path) -> Iterator[Path]:
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified"]
    with engines.running(engine, tiny_model, *options) as socket:
        yield socket


async def begin(proxy: ProxyHarness, tmp_path: Path, **changes: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(KEYS, "utf-8")
    await proxy.open(api_keys_file=keys, **changes)


def said(text: str) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


async def post(
    proxy: ProxyHarness, path: str, text: str, headers: Mapping[str, str]
) -> dict[str, Any]:
    async with proxy.http.post(path, json=said(text), headers=headers) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def cached(proxy: ProxyHarness, text: str, headers: Mapping[str, str]) -> int:
    """Return the estimate for a prompt."""
    found: int = (await post(proxy, "/corral/v1/estimate", text, headers))["cached_tokens"]
    return found


CHAT = "/v1/chat/completions"


async def test_an_estimate_counts_only_prompts_of_the_key_itself(
    proxy: ProxyHarness, socket: Path, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path)
    proxy.router.admit(engines.upstream(socket, 2))
    await post(proxy, CHAT, SECRET, ANNA)
    assert await cached(proxy, SECRET, ANNA) > 100
    assert await cached(proxy, SECRET, ROOT) > 100  # an admin sees all
    assert await cached(proxy, SECRET, BEN) == 0
    await post(proxy, CHAT, TEXT * 8, BEN)
    guesses = {await cached(proxy, TEXT * 12 + guess, BEN) for guess in ("4711", "4712", "0000")}
    assert len(guesses) == 1


async def test_an_explanation_counts_only_prompts_of_the_key_itself(
    proxy: ProxyHarness, socket: Path, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path)
    proxy.router.admit(engines.upstream(socket, 2))
    for _ in range(2):
        await post(proxy, CHAT, SECRET, ANNA)
    explain = {"X-Corral-Explain": "1"}
    told = (await post(proxy, CHAT, SECRET, {**BEN, **explain}))["corral"]
    assert (told["expected_cached_tokens"], told["cache"]["found"]) == (0, 0)
    assert told["cache"]["cause"] == "first_request"
    again = (await post(proxy, CHAT, SECRET, {**BEN, **explain}))["corral"]
    assert again["cache"]["found"] > 100
    proxy.history.stored = [
        {**fields, "id": fields["request"]} for fields in finished(proxy, "ben")[:1]
    ]
    shown = {}
    for headers in (BEN, ROOT):
        path = f"/corral/v1/requests/{proxy.history.stored[0]['id']}"
        async with proxy.http.get(path, headers=headers) as response:
            shown[headers["Authorization"]] = await response.json()
    ben, root = shown.values()
    assert (ben["cached_tokens"], ben["expected_cached_tokens"]) == (0, 0)
    assert root["cached_tokens"] > 100
    total = root["cached_tokens"] + root["prompt_tokens"]
    assert ben["cached_tokens"] + ben["prompt_tokens"] == total


def finished(proxy: ProxyHarness, client: str) -> list[dict[str, Any]]:
    return [event for event in proxy.events("request.finished") if event["client"] == client]


def test_figures_without_a_finding_tell_nothing_of_caches() -> None:
    fields = {"cached_tokens": 40, "prompt_tokens": 2, "expected_cached_tokens": 32, "cache": None}
    shown = own_figures(fields)
    assert (shown["cached_tokens"], shown["prompt_tokens"]) == (0, 42)
    assert shown["expected_cached_tokens"] == 0


def test_saved_time_is_that_of_a_clients_own_tokens() -> None:
    cache = {"cause": "all_found", "found": 40, "own": 10, "saved_ms": 800.0}
    fields = {"cached_tokens": 40, "prompt_tokens": 2, "cache": cache}
    assert own_figures(fields)["cache"]["saved_ms"] == 200


async def test_an_id_is_a_name_within_its_key(proxy: ProxyHarness, tmp_path: Path) -> None:
    async def computes(call: Call) -> None:
        progress = b'{"total":40,"cache":10,"processed":20,"time_ms":1}'
        await call.begin_stream()
        await call.chunk(
            b'data: {"choices":[{"index":0,"delta":{}}],"prompt_progress":%s}\n\n' % progress
        )
        await call.until_left()

    await begin(proxy, tmp_path)
    fake = await proxy.fake(computes, is_admitted=False)
    proxy.router.admit(fake.upstream(slots=1))
    same = {"X-Request-Id": "same"}

    async def send(headers: Mapping[str, str]) -> None:
        body = {**said("hello"), "stream": True}
        async with proxy.http.post(CHAT, json=body, headers={**headers, **same}) as response:
            await response.read()

    async def shown(headers: Mapping[str, str], phase: str) -> dict[str, Any]:
        """Wait until the request of a key is in a phase; return it."""
        while True:
            async with proxy.http.get("/corral/v1/requests", headers=headers) as response:
                for request in (await response.json())["requests"]:
                    if request["phase"] == phase:
                        found: dict[str, Any] = request
                        return found

    async with asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S):
        annas = group.create_task(send(ANNA))
        await shown(ANNA, "prefill")
        bens = group.create_task(send(BEN))
        ben = await shown(BEN, "queued")
        assert (ben["instance"], ben["slot"], ben["prompt_tokens"]) == (None, None, None)
        anna = await shown(ANNA, "prefill")
        assert (anna["position"], anna["prompt_tokens"]) == (None, 40)
        async with proxy.http.post("/corral/v1/requests/same/cancel", headers=BEN) as response:
            assert response.status == 200
        await asyncio.wait([bens])
        await shown(ANNA, "prefill")
        annas.cancel()


ALL = CacheOwner("anna"), CacheOwner("ben")
ALONE = CacheOwner("anna", is_alone=True), CacheOwner("ben", is_alone=True)


def prompt(text: str, owner: CacheOwner) -> Prompt:
    read = read_prompt(EndpointKind.CHAT, "chat", said(text), owner)
    assert read
    return read


@pytest.mark.parametrize("owners", [ALL, ALONE])
def test_a_conversation_is_of_one_key_and_so_is_its_deletion(
    owners: tuple[CacheOwner, CacheOwner],
) -> None:
    index, conversations = PrefixIndex(1000), []
    index.register(upstream("a"))
    for owner in owners:
        found = prompt(SECRET, owner)
        conversations.append(index.assign(upstream("a"), found, None, index.look_up(found, None)))
    annas, bens = conversations
    assert annas is not bens
    hashes, _, numbers = index.forget_conversations(tuple(bens.turn_hashes))
    assert numbers == {bens.number}
    assert index.look_up(prompt(SECRET, owners[0]), None).conversation is annas
    assert not hashes & set(annas.turn_hashes)


@pytest.mark.parametrize(("owners", "is_shared"), [(ALL, True), (ALONE, False)])
def test_keys_share_blocks_of_prompts_only_where_they_share_caches(
    owners: tuple[CacheOwner, CacheOwner], *, is_shared: bool
) -> None:
    annas, bens = (prompt(SECRET, owner) for owner in owners)
    assert (annas.blocks == bens.blocks) == is_shared
    assert not set(annas.turn_hashes) & set(bens.turn_hashes)
    told = [{case.shared_turn_hash(turn) for turn in case.turn_hashes} for case in (annas, bens)]
    assert (told[0] == told[1]) == is_shared
    plain = ask(SECRET).prompt
    assert plain
    assert (set(plain.turn_hashes) == told[0]) == is_shared


@pytest.fixture(scope="module")
def tracked(engine: Engine, tiny_model: Path) -> Iterator[Path]:
    """An engine as the supervisor starts it: slots are named, and it keeps copies in memory."""
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified", "--cache-ram", "64"]
    options += ["--slot-prompt-similarity", "0", "--slots"]
    with engines.running(engine, tiny_model, *options) as socket:
        yield socket


def body_of(path: str, text: str) -> dict[str, Any]:
    match path:
        case "/v1/chat/completions" | "/v1/messages":
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": 16}
    return {"prompt": text, "max_tokens": 2, "n_predict": 2}


async def found(
    proxy: ProxyHarness, path: str, text: str, headers: Mapping[str, str], **more: Any
) -> int:
    """Send a request; return how much of its prompt the engine found."""
    before = len(proxy.events("request.finished"))
    body = {"model": "chat", **body_of(path, text), **more}
    async with proxy.http.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await until(lambda: len(proxy.events("request.finished")) > before)
    tokens: int = proxy.events("request.finished")[-1]["cached_tokens"]
    return tokens


PATHS = (CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/completion", "/generate")


@pytest.mark.parametrize("can_name_slots", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_a_key_that_shares_nothing_finds_only_its_own_prompts(
    proxy: ProxyHarness, tracked: Path, tmp_path: Path, path: str, *, can_name_slots: bool
) -> None:
    """Whatever slots hold, and the copies in main memory that the engine has beside them."""
    await begin(proxy, tmp_path, share_caches="key")
    whole = replace(engines.upstream(tracked, 2), can_name_slots=can_name_slots)
    proxy.router.admit(whole, [RestoredSlot(0)])  # it has computed prompts of others before
    own = 0
    for at in range(6):
        secret = f"{path} {can_name_slots} {at} {SECRET}"
        await found(proxy, path, secret, ANNA)
        own += await found(proxy, path, secret, ANNA)
        for number in range(at % 3):  # then it is in main memory alone
            await found(proxy, path, f"{number} {at} {TEXT * 9}", ANNA)
        # No more than its own prompts have in common: the template and the first words.
        assert await found(proxy, path, secret, BEN, stream=at % 2 == 0) < FEW_TOKENS
    assert (own > 100) == can_name_slots


async def test_a_request_that_failed_makes_no_slot_its_keys_own(
    proxy: ProxyHarness, tracked: Path, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    whole = replace(engines.upstream(tracked, 2), can_name_slots=True)
    proxy.router.admit(whole, [RestoredSlot(0)])
    secrets = [f"failed {at} {SECRET}" for at in range(2)]
    for secret in secrets:
        await found(proxy, CHAT, secret, ANNA)
    for _ in range(4):
        async with proxy.http.post(CHAT, json=said(TEXT * 200), headers=BEN) as response:
            assert response.status == 400
    assert [await found(proxy, CHAT, secret, BEN) for secret in secrets] == [0, 0]


async def test_prompts_are_not_prefilled_for_a_key_that_shares_nothing(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    body, path = said(SECRET), "/corral/v1/models/chat/warm"
    async with proxy.http.post(path, json=body, headers=BEN) as response:
        assert (response.status, "share_caches" in await response.text()) == (403, True)
    assert proxy.reader.asked == []


async def test_a_prefilled_prompt_tells_nothing_of_other_keys(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path)
    path = "/corral/v1/models/chat/warm"
    for headers, cached_tokens in ((BEN, 0), (ROOT, 12)):  # 30 computed, and 12 cached
        (told,) = (await post(proxy, path, SECRET, headers))["data"]
        assert (told["cached"], told["tokens"]) == (cached_tokens, 42 - cached_tokens)


@pytest.mark.parametrize("more", [{"n": 2}, {"id_slot": 0}, {"cache_prompt": True}], ids=str)
async def test_no_member_of_a_request_reaches_another_keys_caches(
    proxy: ProxyHarness, tracked: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    whole = replace(engines.upstream(tracked, 2), can_name_slots=True)
    proxy.router.admit(whole, [RestoredSlot(0)])
    for at in range(3):
        secret = f"{more} {at} {SECRET}"
        await found(proxy, CHAT, secret, ANNA)
        assert await found(proxy, CHAT, secret, BEN, **more) < FEW_TOKENS


async def test_without_other_keys_nothing_is_computed_again(
    proxy: ProxyHarness, tracked: Path, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    proxy.router.admit(replace(engines.upstream(tracked, 2), can_name_slots=True))
    secret = f"alone {SECRET}"
    await found(proxy, CHAT, secret, ANNA)
    assert await found(proxy, CHAT, secret, ANNA) > 100


async def test_a_machine_that_shares_keeps_the_clients_of_others_apart(
    proxy: ProxyHarness, tracked: Path, tmp_path: Path
) -> None:
    """As another llama-corral asks for them, whose keys share nothing."""
    await begin(proxy, tmp_path)
    proxy.router.admit(replace(engines.upstream(tracked, 2), can_name_slots=True))
    one, other = ({**ANNA, "X-Corral-Hop": "1", CACHE_OWNER: name} for name in ("1", "2"))
    secret = f"node {SECRET}"
    await found(proxy, CHAT, secret, one)
    assert await found(proxy, CHAT, secret, one) > 100
    assert await found(proxy, CHAT, secret, other) == 0
    assert await found(proxy, CHAT, secret, BEN) == 0


class SentRequest:
    is_placed = False


def begun(owners: SlotOwners, owner: CacheOwner, id_slot: int | None) -> bool:
    """Begin a request that the engine gives a slot at once; return whether it may reuse."""
    request = SentRequest()
    is_reusing = owners.begin(request, owner, id_slot)
    request.is_placed = True
    return is_reusing


def test_owners_of_slots() -> None:
    anna, ben, cora = (CacheOwner(name, is_alone=True) for name in ("anna", "ben", "cora"))
    owners = SlotOwners()
    assert begun(owners, anna, None)
    assert owners.may_reuse(anna, 1)
    assert not owners.may_reuse(ben, 0)
    assert not begun(owners, ben, 0)
    assert not owners.may_reuse(anna, None)
    assert not owners.may_reuse(ben, 0)  # the engine has not yet told the tokens that it computed
    owners.end(ben, 0)
    assert owners.may_reuse(ben, 0)
    assert not owners.may_reuse(anna, 0)
    assert not owners.may_reuse(CacheOwner("dora"), 0)
    begun(owners, cora, 0)
    assert not owners.may_reuse(ben, 0)
    owners.end(cora, 0)
    begun(owners, ben, None)  # it may have got any slot
    assert not owners.may_reuse(cora, 0)


def test_a_slot_that_an_unnamed_request_may_have_taken_is_nobodys() -> None:
    anna, ben = ALONE
    owners = SlotOwners(is_new=False)
    begun(owners, anna, 0)
    begun(owners, ben, None)  # it takes slot 0 as soon as the engine is done with it
    owners.end(anna, 0)
    assert not owners.may_reuse(anna, 0)
    unnamed = SentRequest()
    owners.begin(unnamed, ben, None)
    begun(owners, anna, 1)
    owners.end(anna, 1)
    owners.fill(anna, 0)
    assert not any(owners.may_reuse(anna, slot) for slot in (0, 1))  # it has yet to take a slot
    unnamed.is_placed = True
    begun(owners, anna, 1)
    owners.end(anna, 1)
    assert owners.may_reuse(anna, 1)


def test_an_unnamed_request_waits_for_the_slots_of_those_that_reuse() -> None:
    anna, ben = ALONE
    owners = SlotOwners(is_new=False)
    begun(owners, anna, 0)
    owners.end(anna, 0)
    reusing, own, unnamed, named, later = (SentRequest() for _ in range(5))
    assert owners.begin(reusing, anna, 0)
    owners.begin(own, anna, None)
    owners.begin(unnamed, ben, None)
    owners.begin(named, ben, 1)
    assert not owners.begin(later, anna, 0)
    waiting = [case for case in (reusing, own, unnamed, named, later) if owners.must_wait(case)]
    assert waiting == [unnamed]
    reusing.is_placed = True
    assert not owners.must_wait(unnamed)


@pytest.mark.parametrize("is_new", [True, False])
def test_owners_that_share_see_all_but_exclusive_content(*, is_new: bool) -> None:
    anna, ben = ALL
    owners = SlotOwners(is_new=is_new)
    begun(owners, anna, 0)
    assert owners.may_reuse(ben, 0)
    assert not owners.may_reuse(ALONE[0], None)
    begun(owners, ALONE[0], 1)
    assert not owners.may_reuse(ben, None)


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("is_sent_again", [True, False])
async def test_a_request_waits_until_another_keys_request_has_its_slot(
    *, is_placed: bool, is_sent_again: bool
) -> None:
    """Else it could take that slot, and leave a prompt in it that the other then reuses."""
    router, entered = Router(), asyncio.Event()
    router.admit(replace(upstream("a", 3), can_name_slots=True))
    annas, bens = (replace(ask(SECRET), owner=owner) for owner in ALONE)

    async def second() -> None:
        async with router.lease(bens):
            entered.set()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        async with router.lease(annas) as lease:
            if is_sent_again:
                lease.note_header()
                await router.send_again(lease)
            group.create_task(second())
            await until(lambda: len(router.instances()[0].leases) == 2)
            for _ in range(20):  # it has nothing else to wait for
                await asyncio.sleep(0)
            assert not entered.is_set()
            if is_placed:
                lease.note_header()
                await entered.wait()
        await entered.wait()


def infill(text: str) -> dict[str, Any]:
    return {"input_prefix": text, "input_suffix": "the end", "prompt": "", "n_predict": 2}


@pytest.mark.parametrize("can_name_slots", [True, False])
async def test_infill_finds_only_the_prompts_of_its_own_key(
    proxy: ProxyHarness, filling: Path, tmp_path: Path, *, can_name_slots: bool
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    whole = replace(engines.upstream(filling, 2), can_name_slots=can_name_slots)
    proxy.router.admit(whole, [RestoredSlot(0)])
    own = 0
    for at in range(4):
        secret, is_stream = f"{can_name_slots} {at} {SECRET}", at % 2 == 0
        for headers in (ANNA, ANNA, BEN):
            tokens = await found(proxy, "/infill", "", headers, **infill(secret), stream=is_stream)
            own += tokens if headers is ANNA else 0
            assert headers is ANNA or tokens < FEW_TOKENS
    assert (own > 100) == can_name_slots


@pytest.fixture(scope="module")
def filling(engine: Engine, tiny_model: Path) -> Iterator[Path]:
    """An engine whose vocabulary has the marks that filling in the middle needs."""
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified", "--cache-ram", "64"]
    for number, name in enumerate(("pre", "suf", "mid"), 2):
        options += ["--override-kv", f"tokenizer.ggml.fim_{name}_token_id=int:{number}"]
    with engines.running(engine, tiny_model, *options, "-sps", "0", "--slots") as socket:
        yield socket


async def reused(proxy: ProxyHarness, upstream: Upstream) -> int:
    """Return how many tokens of prompts the engine has found since it started."""
    request = get_request("/metrics")
    page = await fetch(upstream, request, proxy.settings, PATIENCE_S, 1_000_000)
    return int(plain_values(page.body.decode())["prompt_tokens_cached_total"])


async def vectors(proxy: ProxyHarness, text: str | list[str], headers: Mapping[str, str]) -> None:
    body = {"model": "chat", "input": text}
    async with proxy.http.post("/v1/embeddings", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


@pytest.mark.parametrize("pooling", ["none", "mean", "cls", "rank"])
async def test_an_engine_for_vectors_reuses_nothing_of_a_text(
    proxy: ProxyHarness, engine: Engine, tmp_path: Path, tiny_model: Path, pooling: str
) -> None:
    """So keys need not be kept apart in it: a cached text serves not even its own key."""
    model, options = tiny_model, ["-c", "2048", "-np", "2", "-t", "1", "--metrics"]
    options += ["--rerank"] if pooling == "rank" else ["--embeddings", "--pooling", pooling]
    if pooling == "rank":
        model = tiny_bert.make(tmp_path / "rank.gguf", "rank")
    with engines.running(engine, model, *options, "--no-kv-unified") as socket:
        own = engines.upstream(socket, 2)
        proxy.router.admit(own)
        documents = ["a b c " * 20, "d e f " * 20]
        for path, body in (
            ("/embedding", {"content": TEXT}),
            ("/embeddings", {"content": [TEXT, TEXT]}),
            ("/v1/rerank", {"query": "a cat", "documents": documents}),
        ) * 3:
            if ("rerank" in path) == (pooling == "rank"):
                async with proxy.http.post(path, json=body) as response:
                    assert response.status == 200, await response.text()
        assert await reused(proxy, own) == 0


async def test_vectors_made_from_the_last_token_reuse_only_texts_of_their_own_key(
    proxy: ProxyHarness, engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    options = ["-c", "8192", "-np", "2", "-t", "1", "--metrics", "--no-kv-unified", "-sps", "0"]
    pooling = ["--embeddings", "--pooling", "last"]
    with engines.running(engine, tiny_model, *options, *pooling) as socket:
        own = replace(engines.upstream(socket, 2), reuses_vectors=True)
        proxy.router.admit(own)
        for headers in (ANNA, BEN, ANNA):
            before = await reused(proxy, own)
            await vectors(proxy, [SECRET, SECRET], headers)
            assert await reused(proxy, own) - before < FEW_TOKENS
        before = await reused(proxy, own)
        await vectors(proxy, [SECRET, SECRET], ANNA)
        assert await reused(proxy, own) - before > 100
        before = await reused(proxy, own)
        async with asyncio.TaskGroup() as group:
            for headers in (BEN, ROOT, ANNA):  # more than there are slots, at once
                group.create_task(vectors(proxy, SECRET, headers))
        assert await reused(proxy, own) - before < FEW_TOKENS


async def test_vectors_are_not_made_where_the_slots_cannot_be_cleared(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    async def refuse(call: Call) -> None:
        await call.head("Content-Length: 0", status="501 Not Implemented")

    await begin(proxy, tmp_path, share_caches="key")
    fake = await proxy.fake(refuse, is_admitted=False)
    proxy.router.admit(replace(fake.upstream(), reuses_vectors=True))
    body = {"model": "chat", "input": SECRET}
    async with proxy.http.post("/v1/embeddings", json=body, headers=ANNA) as response:
        assert (response.status, "did not clear" in await response.text()) == (502, True)
    assert (await fake.calls.get()).line == "POST /completion HTTP/1.1"
    assert fake.calls.empty()


@pytest.mark.parametrize("is_corral", [True, False])
async def test_a_node_is_told_the_owner_or_to_reuse_nothing(
    proxy: ProxyHarness, tmp_path: Path, *, is_corral: bool
) -> None:
    await begin(proxy, tmp_path, share_caches="key")
    fake = await proxy.fake(is_admitted=False)
    node = Node("far", "chat", process="p" if is_corral else "")
    proxy.router.admit(replace(fake.upstream(), node=node))
    told = []
    for headers in (ANNA, ANNA, BEN):
        async with proxy.http.post(CHAT, json=said("hello"), headers=headers) as response:
            assert response.status == 200
        call = await fake.calls.get()
        is_off = json.loads(call.body).get("cache_prompt") is False
        told.append((call.headers.get(CACHE_OWNER), is_off))
    if is_corral:
        assert told[0] == told[1] != told[2]
        assert not any(is_off for _, is_off in told)
        assert "anna" not in str(told)
    else:
        assert told[0][1]
        assert told[2][1]
