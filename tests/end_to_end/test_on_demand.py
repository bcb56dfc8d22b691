"""Models loaded on demand and evicted for each other, in memory for two of three."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, until

from scripts.bench import mixed_requests

# Each takes about 41 MiB at its start: two fit, three do not.
SETTINGS = """
[supervisor]
memory_budget = "100 MiB"
eviction_wait_s = 0.5
persist_slots = false

[models.a]
path = "{path}"
min_residency_s = 0.1

[models.b]
path = "{path}"
preload = false
min_residency_s = 0.1

[models.c]
path = "{path}"
preload = false
min_residency_s = 0.1
{more}
"""


def configured(corral: CorralCli, model: Path, more: str = "") -> CorralCli:
    corral.configure(SETTINGS.format(path=model, more=more))
    return corral


async def ask(http: aiohttp.ClientSession, model: str) -> str:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["model"])


async def ask_all(url: str, models: list[str]) -> Counter[str]:
    """Send a request to each model, eight at a time."""
    waiting, answered = list(models), Counter[str]()

    async def go_on(http: aiohttp.ClientSession) -> None:
        while waiting:
            answered[await ask(http, waiting.pop())] += 1

    async with aiohttp.ClientSession(url) as http, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(go_on(http))
    return answered


def test_a_start_loads_only_preloaded_models(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model).ok("start")
    assert corral.model_states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    shown = [line.split()[:2] for line in corral.ok("status").splitlines()]
    assert ["b.0", "unloaded"] in shown


def test_a_request_loads_its_model_and_idle_models_are_unloaded_for_it(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    asyncio.run(ask_all(corral.url, ["b"]))
    assert corral.model_states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    asyncio.run(ask_all(corral.url, ["c"]))
    assert sorted(corral.model_states().values()) == ["loaded", "loaded", "unloaded"]
    assert corral.model_states()["c"] == "loaded"


def test_mixed_requests_for_more_models_than_fit_are_all_answered(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    lists = mixed_requests.make_requests("abc", seed=7, clients=8, count=48)
    answers = [*chain.from_iterable(asyncio.run(mixed_requests.send_all(corral.url, lists)))]
    assert [answer.problem for answer in answers] == [None] * 48
    assert sum(instance.run for instance in corral.instances().values()) < len(answers) / 2


def test_requests_that_wait_for_memory_are_shown_and_end_with_a_stop(
    corral: CorralCli, tiny_model: Path
) -> None:
    kept = SETTINGS.replace("min_residency_s = 0.1", "min_residency_s = 600")
    corral.configure(kept.format(path=tiny_model, more=""))
    corral.ok("start", "a", "b")
    call = mixed_requests.ModelRequest("c", is_chat=True, is_stream=False, tokens=4, words="hello")
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(asyncio.run, mixed_requests.send_all(corral.url, [[call]]))
        until(lambda: "c: 1 waiting for memory" in corral.ok("status"))
        corral.ok("stop", "c")
        ((answer,),) = asked.result(PATIENCE_S)
    assert "it is stopped (corral start c)" in str(answer.problem)


def test_a_busy_model_is_drained_before_it_is_unloaded_for_another(
    corral: CorralCli, slow_model: Path
) -> None:
    more = "\n[models.c.flags]\nctx-size = 4096"
    corral.configure(SETTINGS.replace("100 MiB", "420 MiB").format(path=slow_model, more=more))
    corral.ok("start")
    asyncio.run(ask_all(corral.url, ["b"]))
    streams = [begin_stream(corral, 150, model) for model in ("a", "b")]
    asyncio.run(ask_all(corral.url, ["c"]))
    for stream in streams:
        assert stream.read().rstrip().endswith(b"data: [DONE]")


def test_a_request_loads_an_unloaded_model_and_not_a_stopped_one(
    corral: CorralCli, tiny_model: Path
) -> None:
    configured(corral, tiny_model).ok("start")
    corral.ok("unload", "a")
    assert corral.model_states()["a"] == "unloaded"
    asyncio.run(ask_all(corral.url, ["a"]))
    assert corral.model_states()["a"] == "loaded"
    corral.ok("stop", "a")
    assert corral.model_states()["a"] == "failed"
    corral.ok("load", "a")
    assert corral.model_states()["a"] == "loaded"


def test_an_unused_model_is_unloaded_after_its_ttl(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model, "ttl_s = 0.5").ok("start")
    asyncio.run(ask_all(corral.url, ["c"]))
    until(lambda: corral.model_states()["c"] == "unloaded")
    assert corral.model_states()["a"] == "loaded"


async def ask_to_keep(url: str, model: str, keep_alive: object) -> None:
    body = {"model": model, "max_tokens": 4, "keep_alive": keep_alive, "prompt": "hello"}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()


def test_a_request_says_how_long_its_model_stays(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model, "ttl_s = 600\nreplicas = 2").ok("start")
    asyncio.run(ask_to_keep(corral.url, "c", -1))
    asyncio.run(ask_all(corral.url, ["c"]))  # says nothing, and changes nothing
    until(lambda: "c: stays loaded (keep_alive)" in corral.ok("status"))
    asyncio.run(ask_to_keep(corral.url, "c", "1h30m"))
    until(lambda: "c: unloaded in 1h 29m without a request (keep_alive)" in corral.ok("status"))
    asyncio.run(ask_to_keep(corral.url, "c", 0))
    replicas = ("c.0", "c.1")
    until(lambda: {corral.instances()[name].state for name in replicas} == {"stopped"})
    assert corral.model_states()["c"] == "unloaded"
    asyncio.run(ask_all(corral.url, ["c"]))  # loads it, and the setting counts again
    until(lambda: "c: unloaded in 9m" in corral.ok("status"))


async def look(url: str, model: str, method: str = "GET") -> int:
    page = f"/props?model={model}"
    async with aiohttp.ClientSession(url) as http, http.request(method, page) as response:
        return response.status


def test_reading_the_props_of_a_model_does_not_load_it(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model).ok("start")
    url = corral.url
    assert [asyncio.run(look(url, "b", method)) for method in ("GET", "HEAD")] == [503, 503]
    assert corral.model_states()["b"] == "unloaded"
    asyncio.run(ask_all(url, ["b"]))
    assert asyncio.run(look(url, "b")) == 200
    corral.ok("unload", "b")
    assert asyncio.run(look(url, "b")) == 200  # remembered
    assert corral.model_states()["b"] == "unloaded"


def test_a_client_of_the_router_mode_loads_and_unloads(corral: CorralCli, tiny_model: Path) -> None:
    configured(corral, tiny_model).ok("start")
    corral.ok("stop", "c")
    assert asyncio.run(load_and_unload(corral.url, "b")) == ["loading", "loaded", "unloaded"]
    assert corral.model_states() == {"a": "loaded", "b": "unloaded", "c": "failed"}


async def load_and_unload(url: str, model: str) -> list[str]:
    """Return the states of a model as they were sent."""
    states: list[str] = []
    async with aiohttp.ClientSession(url) as http, http.get("/models/sse") as events:
        async with http.post("/models/load", json={"model": "c"}) as response:
            assert response.status == 503  # an operator stopped it
        for verb, end in (("load", "loaded"), ("unload", "unloaded")):
            async with http.post(f"/models/{verb}", json={"model": model}) as response:
                assert await response.json() == {"success": True}
            while states[-1:] != [end]:
                event = await next_event(events)
                assert event["model"] == model
                states += [state for state in [event["data"]["status"]] if states[-1:] != [state]]
    return states


async def next_event(events: aiohttp.ClientResponse) -> dict[str, Any]:
    async for line in events.content:
        if line.startswith(b"data: "):
            return dict(json.loads(line.removeprefix(b"data: ")))
    raise AssertionError("the events ended")


def test_models_without_room_beside_a_pinned_one_are_refused_with_the_reason(
    corral: CorralCli, tiny_model: Path
) -> None:
    text = SETTINGS.replace("100 MiB", "60 MiB").replace("min_residency_s", "pinned = true\n#", 1)
    corral.configure(text.format(path=tiny_model, more=""))
    corral.ok("start")
    refused = corral("load", "b")
    assert refused.returncode != 0
    assert "no memory for it beside a, which no request for it unloads" in refused.stderr
    corral.ok("stop", "a")
    corral.ok("load", "b")
