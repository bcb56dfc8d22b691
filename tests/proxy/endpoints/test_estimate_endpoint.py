"""`/corral/v1/estimate`, `Prefer: wait`, and the errors of estimates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.proxy_harness import CHAT, ProxyHarness, model_info, until
from support.requests import ask
from support.upstream import Call

from proxy.common.background_tasks import FAILURES
from proxy.endpoints.requests import estimate_json
from proxy.router.estimator import Estimate, Estimator, LoadForecast
from proxy.router.model_queue import ModelQueue
from proxy.upstream.upstream import Rates

URL = "/corral/v1/estimate"
LONG = "word " * 800
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"timings":{"cache_n":0,'
    b'"prompt_n":1000,"prompt_ms":5,"predicted_n":10,"predicted_ms":100}}\n\ndata: [DONE]\n\n'
)


async def answers(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(TOKEN)
    await call.chunk(END)
    await call.end()


# Of an engine that takes a hundredth of a second for each token of a prompt.
SLOW = Rates(prefill_tps=100.0, answers=1)


async def estimate(proxy: ProxyHarness, expected: int = 200, **members: Any) -> dict[str, Any]:
    async with proxy.http.post(URL, json={**CHAT, **members}) as response:
        assert response.status == expected, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def learned(proxy: ProxyHarness) -> None:
    """Have one long chat answered."""
    await proxy.fake(answers)
    async with proxy.ask(stream=True, messages=[{"role": "user", "content": LONG}]) as response:
        await response.read()
    assert Estimator(proxy.router).estimate(ask("hello")).first_token_s


async def test_nothing_is_known_of_a_model_before_its_first_response(proxy: ProxyHarness) -> None:
    await proxy.open()
    fake = await proxy.fake()
    found = await estimate(proxy)
    assert found["first_token_s"] is None
    assert found["queue_s"] is None
    assert (found["model"], found["instance"], found["must_load"]) == ("chat", "chat.1", False)
    assert found["prompt_tokens"] >= 1
    assert found["cached_tokens"] == 0
    assert fake.calls.empty()


async def test_an_estimate_leaves_everything_as_it_was(proxy: ProxyHarness) -> None:
    await proxy.open()
    await learned(proxy)
    before = (proxy.router.instances(), proxy.router.queues.stats(), len(proxy.emitted))
    found = await estimate(proxy, messages=[{"role": "user", "content": LONG}])
    assert found["first_token_s"] is not None
    assert found["cached_tokens"] > 500
    assert (proxy.router.instances(), proxy.router.queues.stats()) == before[:2]
    await until(lambda: len(proxy.emitted) > before[2])
    (logged,) = proxy.emitted[before[2] :]  # it appears in usage as a request does
    assert (logged[0], logged[1]["path"], logged[1]["instance"]) == ("request.finished", URL, None)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "The sea is"},
        {"system": "short", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"input": "The sea is"},
    ],
)
async def test_bodies_of_other_apis_are_estimated_too(
    proxy: ProxyHarness, body: dict[str, Any]
) -> None:
    await proxy.open()
    await proxy.fake()
    async with proxy.http.post(URL, json={"model": "chat", **body}) as response:
        assert response.status == 200


async def test_a_body_without_a_prompt_or_with_an_unknown_model_is_refused(
    proxy: ProxyHarness,
) -> None:
    await proxy.open()
    async with proxy.http.post(URL, json={"model": "chat"}) as response:
        assert response.status == 400
        assert "messages" in (await response.json())["error"]["message"]
    await estimate(proxy, 404, model="other")
    async with proxy.http.get(URL) as response:
        assert response.status == 405


async def test_a_request_that_would_wait_too_long_is_refused_before_it_queues(
    proxy: ProxyHarness,
) -> None:
    await proxy.open()
    fake = await proxy.fake(answers)
    proxy.router.queues["chat"].rates = SLOW
    headers = {"Prefer": "respond-async, wait=1"}
    async with proxy.http.post(
        "/v1/chat/completions",
        json={**CHAT, "messages": [{"role": "user", "content": LONG}]},
        headers=headers,
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "wait_too_long")
        assert "the first token is expected in" in error["message"]
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["Preference-Applied"] == "wait=1"
    assert fake.calls.empty()
    async with proxy.http.post(
        "/v1/chat/completions", json=CHAT, headers={"Prefer": "wait=600"}
    ) as response:
        assert response.status == 200
        assert response.headers["Preference-Applied"] == "wait=600"
    async with proxy.ask() as response:
        assert "Preference-Applied" not in response.headers


async def test_the_error_of_estimates_is_a_metric(proxy: ProxyHarness) -> None:
    await proxy.open()
    await learned(proxy)
    async with proxy.http.post(
        "/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Prefer": "wait=600"}
    ) as response:
        assert await response.read()
    async with proxy.http.get("/metrics") as response:
        text = await response.text()
    assert 'corral_estimate_error_ratio_count{model="chat"} 1.0' in text


def test_models_that_a_key_may_not_use_are_not_named() -> None:
    load = LoadForecast(1.0, ("other", "secret"))
    found = estimate_json(Estimate("chat", 1, 1, None, load=load), lambda model: model == "other")
    assert found["evicts"] == ["other"]


class Forecaster:
    def __init__(self, forecast: LoadForecast | None) -> None:
        self.forecast = forecast

    def load_forecast(self, _model: str, /) -> LoadForecast | None:
        return self.forecast


async def test_a_model_that_is_not_loaded_is_loaded_first(proxy: ProxyHarness) -> None:
    await proxy.open()
    proxy.loader.model_infos = [model_info("chat", "unloaded")]
    proxy.router.queues["chat"].rates = SLOW
    forecast = LoadForecast(4.0, ("other",), slots=2)
    found = Estimator(proxy.router, Forecaster(forecast)).estimate(ask("hello"))
    assert found.first_token_s
    assert found.first_token_s > 4.0
    assert found.queue_s == 0.0
    assert found.load == forecast
    refused = LoadForecast(4.0, refusal="there is no memory")
    assert Estimator(proxy.router, Forecaster(refused)).estimate(ask("hello")).first_token_s is None
    never = LoadForecast(None)
    assert Estimator(proxy.router, Forecaster(never)).estimate(ask("hello")).first_token_s is None


async def test_what_a_model_taught_outlives_its_instance(proxy: ProxyHarness) -> None:
    await proxy.open()
    await proxy.fake(answers)
    async with proxy.ask(stream=True, messages=[{"role": "user", "content": LONG}]) as response:
        await response.read()
    proxy.router.withdraw("chat.1")
    found = Estimator(proxy.router, Forecaster(LoadForecast(4.0))).estimate(ask("hello"))
    assert found.first_token_s
    assert not found.is_loaded


async def test_a_fault_of_the_estimate_fails_no_request(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def divided_by_zero(*_: Any) -> None:
        raise ZeroDivisionError

    await proxy.open()
    await proxy.fake(answers)
    monkeypatch.setattr(FAILURES, "counts", Counter())
    monkeypatch.setattr(ModelQueue, "place", divided_by_zero)
    async with proxy.ask(stream=True) as response:
        assert b"[DONE]" in await response.read()
    await until(lambda: FAILURES.counts["estimate"] == 1)
