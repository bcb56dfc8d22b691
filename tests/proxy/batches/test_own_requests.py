"""Requests of our own, answered by the real engine behind the proxy's router."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import engine as engines
from support.openai_events import check_response
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.batches.own_requests import OwnAnswer, OwnRequests
from proxy.forward.forward import Forward
from proxy.router.estimator import Estimator
from supervisor.builds.discover import Engine


@pytest.fixture(scope="module")
def socket(engine: Engine, slow_model: Path) -> Iterator[Path]:
    options = ["-c", "4096", "-np", "2", "-t", "1"]
    with engines.running(engine, slow_model, *options) as socket:
        yield socket


@pytest.fixture
def own(proxy: ProxyHarness) -> OwnRequests:
    forward = Forward(
        proxy.router, proxy.loader, proxy.settings, proxy.metrics.emit, Estimator(proxy.router)
    )
    return OwnRequests(proxy.core, forward)


async def answer(own: OwnRequests, proxy: ProxyHarness, path: str, **members: Any) -> OwnAnswer:
    return await own.answer(
        path, members, client="tests", names=proxy.loader.names(), request_id="req_1"
    )


@pytest.mark.parametrize(
    ("path", "members", "texts"),
    [
        ("/v1/completions", {"prompt": "the cat", "max_tokens": 4, "stream": True}, 1),
        ("/v1/completions", {"prompt": ["a", "the cat", "in"], "max_tokens": 4}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}, 2),
    ],
)
async def test_the_answer_is_the_engines(
    own: OwnRequests,
    proxy: ProxyHarness,
    socket: Path,
    path: str,
    members: dict[str, Any],
    texts: int,
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    said = await answer(own, proxy, path, model="vendor/chat", **{"max_tokens": 4, **members})
    assert said.status == 200
    assert len(json.loads(said.body)["choices"]) == texts
    (event,) = proxy.events("request.finished")
    assert (event["request"], event["model"], event["status"]) == ("req_1", "chat", 200)
    assert event["decoded_tokens"] >= 4


@pytest.mark.parametrize(
    ("members", "status", "code"),
    [
        ({"model": "other", "prompt": "a"}, 404, "model_not_found"),
        ({"prompt": "a", "stop": ["a"] * 10_000}, 400, "limit_exceeded"),
        ({"prompt": "a" * 200_000}, 413, "body_too_large"),
        ({"prompt": "the " * 9000}, 400, "context_length_exceeded"),
    ],
)
async def test_an_error_is_an_answer(
    own: OwnRequests,
    proxy: ProxyHarness,
    socket: Path,
    members: dict[str, Any],
    status: int,
    code: str,
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    said = await answer(own, proxy, "/v1/completions", **members)
    assert (said.status, json.loads(said.body)["error"]["code"]) == (status, code)


async def test_an_endpoint_that_no_instance_has_is_an_error(
    own: OwnRequests, proxy: ProxyHarness
) -> None:
    said = await answer(own, proxy, "/v1/nothing", prompt="a")
    assert (said.status, json.loads(said.body)["error"]["code"]) == (404, "not_found")


async def test_cancelled_it_ends_in_the_engine(
    own: OwnRequests, proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    asking = asyncio.get_running_loop().create_task(
        answer(own, proxy, "/completion", prompt="a", n_predict=-1, ignore_eos=True)
    )
    await until(lambda: proxy.router.count_in_flight("chat.1") == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: not proxy.router.instances()[0].leases)
    (event,) = proxy.events("request.finished")
    assert (asking.cancelled(), event["status"]) == (True, 499)


async def test_a_drain_aborts_it(own: OwnRequests, proxy: ProxyHarness) -> None:
    async def hold(call: Call) -> None:
        await call.until_left()

    await proxy.fake(hold)
    asking = asyncio.get_running_loop().create_task(
        answer(own, proxy, "/v1/completions", prompt="a")
    )
    await until(lambda: proxy.router.count_in_flight("chat.1") == 1)
    await proxy.server.drain(0)
    said = await asking
    assert (said.status, json.loads(said.body)["error"]["code"]) == (503, "draining")


async def test_a_response_has_all_members_of_openais(
    own: OwnRequests, proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))
    said = await answer(
        own, proxy, "/v1/responses", model="chat", input="the cat", max_output_tokens=4
    )
    assert said.status == 200
    check_response(json.loads(said.body))
