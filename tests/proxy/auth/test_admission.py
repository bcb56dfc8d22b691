"""The limits of a key hold for all its work."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import CHAT, ProxyHarness, until
from support.upstream import Call

from proxy.auth.api_keys import Admission, ApiKeys
from proxy.auth.keys_file import Key
from proxy.errors import KeyLimited
from proxy.observe.record import discard

ANNA = {"Authorization": "Bearer corral-anna-1234"}
BATCH = "/v1/batch/completions"
TIMINGS = {"prompt_n": 3, "prompt_ms": 1.0, "predicted_n": 1, "predicted_ms": 1.0, "cache_n": 0}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def admission(tmp_path: Path, limits: str, clock: Callable[[], float]) -> Admission:
    return Admission(ApiKeys(keys_file(tmp_path, limits), discard), clock)


def keys_file(tmp_path: Path, limits: str) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(f'[keys.anna]\nkey = "corral-anna-1234"\n{limits}\n', "utf-8")
    return path


async def test_a_line_counts_as_a_request_and_is_refused_where_a_request_would_be(
    tmp_path: Path,
) -> None:
    clock = Clock()
    found = admission(tmp_path, "requests_per_minute = 2", clock)
    anna = Key("anna", hashlib.sha256(b"corral-anna-1234").digest(), requests_per_minute=2)
    with found.request(anna):
        pass
    async with found.part("anna"):
        pass
    with pytest.raises(KeyLimited, match="requests_per_minute"):
        async with found.part("anna"):
            pass
    async with found.part("ben"), found.part("anna", requests=0):
        clock.now_s += 30
        async with found.part("anna"):
            pass


async def test_a_part_may_wait_until_another_one_ends(tmp_path: Path) -> None:
    found = admission(tmp_path, "max_in_flight = 1", Clock())
    ended = []

    async def wait() -> None:
        async with found.part("anna", wait_s=60):
            ended.append("second")

    async with asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S), found.part("anna"):
        group.create_task(wait())
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append("first")
    assert ended == ["first", "second"]


@pytest.fixture
async def completes(proxy: ProxyHarness) -> list[str]:
    """An instance that answers completions; the list holds the prompts that it got."""
    got: list[str] = []

    async def answer(call: Call) -> None:
        members = json.loads(call.body)
        got.append(str(members.get("prompt", "")))
        token = {"content": "a", "tokens": [1], "stop": False}
        end = {"content": "", "tokens": [], "stop": True, "tokens_predicted": 1, "timings": TIMINGS}
        await call.begin_stream()
        for event in (token, end):
            await call.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        await call.end()

    await proxy.fake(answer)
    return got


async def post(proxy: ProxyHarness, path: str, **members: Any) -> tuple[int, dict[str, Any]]:
    async with proxy.http.post(path, json=members, headers=ANNA) as response:
        return response.status, await response.json()


async def test_prompts_of_a_batch_run_one_after_the_other_if_the_key_may_have_one_in_flight(
    proxy: ProxyHarness, tmp_path: Path, completes: list[str]
) -> None:
    await proxy.open(api_keys_file=keys_file(tmp_path, "max_in_flight = 1"))
    status, found = await post(proxy, BATCH, prompts=["a", "b", "c"], max_tokens=1)
    assert (status, [result.get("error") for result in found["results"]]) == (200, [None] * 3)
    assert completes == ["a", "b", "c"]


async def test_prompts_of_a_batch_count_as_requests_of_a_minute(
    proxy: ProxyHarness, tmp_path: Path, completes: list[str]
) -> None:
    await proxy.open(api_keys_file=keys_file(tmp_path, "requests_per_minute = 3"))
    assert (await post(proxy, BATCH, prompts=["a", "b", "c"], max_tokens=1))[0] == 200
    status, found = await post(proxy, "/v1/chat/completions", **CHAT)
    assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(completes) == 3


async def test_a_prompt_that_is_prefilled_takes_tokens_of_the_key(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    limits = "tokens_per_day = 100\nmax_context = 90"
    await proxy.open(api_keys_file=keys_file(tmp_path, limits))
    path, text = "/corral/v1/models/chat/warm", {"role": "user", "content": "word " * 60}
    leases = set[object]()  # a prompt in no set cannot be counted beside other requests
    proxy.router.signals.slots_freed.connect(lambda lease, _: leases.add(lease))
    assert (await post(proxy, path, messages=[text]))[0] == 200
    (taken,) = proxy.keep_alives.uses
    assert len(leases) == 1
    assert (taken.client, taken.tokens.total) == ("anna", 43)
    assert [event["client"] for event in proxy.events("request.finished")] == ["anna"]
    long = {"role": "user", "content": "word " * 90}
    status, found = await post(proxy, path, messages=[long])
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    status, found = await post(proxy, path, messages=[text])
    assert (status, found["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(proxy.reader.asked) == 1


async def test_an_estimate_is_a_request_of_its_key(proxy: ProxyHarness, tmp_path: Path) -> None:
    await proxy.open(api_keys_file=keys_file(tmp_path, "requests_per_minute = 1"))
    await proxy.fake()
    assert (await post(proxy, "/corral/v1/estimate", **CHAT))[0] == 200
    assert (await post(proxy, "/corral/v1/estimate", **CHAT))[0] == 429
    await until(lambda: bool(proxy.events("request.finished")))
    (logged,) = proxy.events("request.finished")
    assert (logged["client"], logged["model"], logged["path"]) == (
        "anna",
        "chat",
        "/corral/v1/estimate",
    )
