"""The endpoints of comparisons: who may use them, and their inputs."""

from __future__ import annotations

from typing import Any

import pytest
from support.dashboard_client import origin, signed_in
from support.proxy_harness import ProxyHarness

from proxy.dashboard.host import BenchWish

_PATH = "/corral/v1/bench"
_BODY = {"model": "chat", "profiles": ["low-latency", "low-memory"], "minutes": 5}


async def _post(proxy: ProxyHarness, path: str, body: object = _BODY) -> int:
    async with proxy.http.post(_PATH + path, json=body, headers=origin(proxy)) as response:
        return response.status


async def test_an_admin_begins_and_cancels_and_gets_the_report(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    assert await _post(proxy, "") == 200
    assert await _post(proxy, "/cancel") == 200
    wish = BenchWish("chat", ("low-latency", "low-memory"), "", 5, force=False)
    assert proxy.dashboard.bench.calls == [wish, "cancel"]
    async with proxy.http.get(_PATH) as response:
        assert (await response.json())["job"]["state"] == "running"
    async with proxy.http.get(f"{_PATH}/report") as response:
        assert response.content_type == "application/json"


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"profiles": ["low-latency"]},
        {"profiles": ["low-latency", "low-latency"]},
        {"profiles": ["low-latency", 1]},
        {"profiles": [*"abcdefg"]},
        {"minutes": 0},
        {"minutes": 241},
        {"minutes": True},
        {"force": 1},
        {"workload": ["chat"]},
    ],
)
async def test_other_comparisons_are_refused(proxy: ProxyHarness, change: dict[str, Any]) -> None:
    await signed_in(proxy)
    assert await _post(proxy, "", {**_BODY, **change}) == 400
    assert proxy.dashboard.bench.calls == []


async def test_without_a_session_nothing_is_measured(proxy: ProxyHarness) -> None:
    for path in ("", "/cancel"):
        assert await _post(proxy, path) == 401
    for path in ("", "/report"):
        async with proxy.http.get(_PATH + path) as response:
            assert response.status == 401
    assert proxy.dashboard.bench.calls == []
