"""The endpoints of the models on this machine: who may use them, and the options they accept."""

from __future__ import annotations

from typing import Any

import pytest
from support.dashboard_client import origin, signed_in
from support.proxy_harness import ProxyHarness

from proxy.dashboard.host import StartOptions

_PATH = "/corral/v1/models"


async def _post(proxy: ProxyHarness, verb: str, body: object, **headers: str) -> int:
    url = f"{_PATH}/chat/{verb}"
    async with proxy.http.post(url, json=body, headers=headers) as response:
        return response.status


@pytest.mark.parametrize("verb", ["plan", "start"])
async def test_options_are_optional(proxy: ProxyHarness, verb: str) -> None:
    await signed_in(proxy)
    assert await _post(proxy, verb, {}, **origin(proxy)) == 200
    body = {"profile": "low-latency", "ctx_size": 4096, "slots": 2}
    assert await _post(proxy, verb, body, **origin(proxy)) == 200
    assert proxy.dashboard.machine_models.calls == [
        (verb, "chat", StartOptions()),
        (verb, "chat", StartOptions("low-latency", 4096, 2)),
    ]


async def test_options_are_saved_on_request(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    body = {"slots": 2, "save": True}
    assert await _post(proxy, "start", body, **origin(proxy)) == 200
    assert proxy.dashboard.machine_models.calls == [("save", "chat", StartOptions(slots=2))]


@pytest.mark.parametrize(
    "body",
    [
        *({"ctx_size": value} for value in (0, -1, 2**31, 1.5, "4096", True)),
        {"slots": 0},
        {"profile": 1},
        {"save": 1},
        [],
    ],
)
async def test_other_options_are_refused(proxy: ProxyHarness, body: Any) -> None:
    await signed_in(proxy)
    assert await _post(proxy, "start", body, **origin(proxy)) == 400
    assert proxy.dashboard.machine_models.calls == []


async def test_only_an_admin_may_use_them(proxy: ProxyHarness) -> None:
    async with proxy.http.get(_PATH) as response:
        assert response.status == 401
    for verb in ("plan", "start"):
        assert await _post(proxy, verb, {}) == 401
    await signed_in(proxy)
    for verb in ("plan", "start"):
        assert await _post(proxy, verb, {}, Origin="https://evil.example") == 403
        assert await _post(proxy, verb, {}) == 403
    async with proxy.http.get(_PATH, headers=origin(proxy)) as response:
        assert (await response.json())["models"] == []
    assert proxy.dashboard.machine_models.calls == []
