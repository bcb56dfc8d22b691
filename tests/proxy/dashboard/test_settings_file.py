"""The endpoints of the settings file: who may use them, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.dashboard_client import keep, origin, sign_in, signed_in
from support.proxy_harness import ProxyHarness

_PATH = "/corral/v1/settings"
_CHECK = f"{_PATH}/check"
_BODY = {"text": "a", "etag": "e"}


async def _post(
    proxy: ProxyHarness, url: str, headers: Mapping[str, str], body: object = _BODY
) -> int:
    async with proxy.http.post(url, json=body, headers=headers) as response:
        return response.status


async def _get(proxy: ProxyHarness, headers: Mapping[str, str]) -> int:
    async with proxy.http.get(_PATH, headers=headers) as response:
        return response.status


async def test_the_page_reads_checks_and_saves(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    headers = origin(proxy)
    assert await _get(proxy, headers) == 200
    assert [await _post(proxy, url, headers) for url in (_CHECK, _PATH)] == [200, 200]
    assert proxy.dashboard.settings_file.calls == [("read",), ("check", "a"), ("save", "a", "e")]


@pytest.mark.parametrize("body", [{}, {"text": "a"}, {"etag": "e"}, {"text": 1, "etag": "e"}])
async def test_other_bodies_are_refused(proxy: ProxyHarness, body: object) -> None:
    await signed_in(proxy)
    assert await _post(proxy, _PATH, origin(proxy), body) == 400
    assert proxy.dashboard.settings_file.calls == []


async def test_without_a_session_or_from_another_page_nothing_is_answered(
    proxy: ProxyHarness,
) -> None:
    assert await _get(proxy, {}) == 401
    assert [await _post(proxy, url, {}) for url in (_CHECK, _PATH)] == [401, 401]
    await signed_in(proxy)
    other = {"Origin": "https://evil.example"}
    assert [await _post(proxy, _PATH, headers) for headers in ({}, other)] == [403, 403]
    assert proxy.dashboard.settings_file.calls == []


@pytest.mark.parametrize(("tools", "status"), [("", 403), ("tools = true\n", 200)])
async def test_an_admins_key_needs_tools(
    proxy: ProxyHarness, tmp_path: Path, tools: str, status: int
) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(f'[keys.root]\nkey = "corral-admin-123"\nadmin = true\n{tools}', "utf-8")
    await proxy.server.close()
    await proxy.open(api_keys_file=keys)
    keep(proxy, (await sign_in(proxy, api_key="corral-admin-123"))[1])
    assert await _get(proxy, origin(proxy)) == status
