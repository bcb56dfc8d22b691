"""The endpoints of searches and downloads: rights, and accepted values."""

from __future__ import annotations

import pytest
from support.dashboard_client import origin, signed_in
from support.proxy_harness import ProxyHarness

_DOWNLOADS = "/corral/v1/downloads"


async def _status(proxy: ProxyHarness, method: str, url: str, body: object = None) -> int:
    json = body if method == "POST" else None
    async with proxy.http.request(method, url, headers=origin(proxy), json=json) as response:
        return response.status


async def test_an_admin_searches_downloads_and_cancels(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    assert await _status(proxy, "GET", "/corral/v1/hub?words=%20qwen%203%20") == 200
    assert await _status(proxy, "GET", "/corral/v1/hub/fit?name=org/m:Q8_0") == 200
    for path in (_DOWNLOADS, f"{_DOWNLOADS}/cancel"):
        assert await _status(proxy, "POST", path, {"name": "org/m"}) == 200
    assert proxy.dashboard.hub.calls == [
        ("search", "qwen 3"),
        ("fit", "org/m:Q8_0"),
        ("download", "org/m"),
        ("cancel", "org/m"),
    ]


@pytest.mark.parametrize(
    ("method", "url", "body"),
    [
        ("GET", "/corral/v1/hub", None),
        ("GET", f"/corral/v1/hub?words={'x' * 201}", None),
        ("POST", _DOWNLOADS, {}),
        ("POST", f"{_DOWNLOADS}/cancel", {"name": 1}),
    ],
)
async def test_other_requests_are_refused(
    proxy: ProxyHarness, method: str, url: str, body: object
) -> None:
    await signed_in(proxy)
    assert await _status(proxy, method, url, body) == 400
    assert proxy.dashboard.hub.calls == []


async def test_without_a_session_nothing_is_answered(proxy: ProxyHarness) -> None:
    for method, url in (
        ("GET", "/corral/v1/hub?words=x"),
        ("GET", "/corral/v1/hub/fit?name=org/m"),
        ("GET", _DOWNLOADS),
        ("POST", _DOWNLOADS),
        ("POST", f"{_DOWNLOADS}/cancel"),
    ):
        assert await _status(proxy, method, url, {"name": "org/m"}) == 401
    assert proxy.dashboard.hub.calls == []
