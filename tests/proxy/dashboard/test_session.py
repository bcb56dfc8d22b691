"""A token or an admin's key signs a browser in; other pages and keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.dashboard_client import SESSION as URL
from support.dashboard_client import keep, origin, sign_in, signed_in
from support.proxy_harness import CHAT, ProxyHarness

from proxy.auth.sessions import PAGE_TOKEN

KEYS = (
    '[keys.root]\nkey = "corral-admin-123"\nadmin = true\n[keys.laptop]\nkey = "corral-laptop-12"\n'
)


FORGET = "/corral/v1/caches/none/forget"


async def post(proxy: ProxyHarness, path: str, **headers: str) -> int:
    async with proxy.http.post(path, json={}, headers=headers) as response:
        return response.status


async def with_keys(proxy: ProxyHarness, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS, "utf-8")
    await proxy.server.close()
    await proxy.open(api_keys_file=path)


async def test_a_token_signs_one_browser_in_and_out(proxy: ProxyHarness) -> None:
    assert proxy.sessions
    token = proxy.sessions.new_token()
    async with proxy.http.post(URL, json={"token": token}, headers=origin(proxy)) as response:
        answer = await response.json()
        keep(proxy, answer)
        page_token = answer.pop("page_token")
        assert answer == {
            "signed_in": True,
            "client": "(dashboard)",
            "expires_in_s": 43_200,
            "has_keys": False,
        }
        cookie = response.headers["Set-Cookie"]
        assert response.headers["Cache-Control"] == "no-store"
    name, _, rest = cookie.partition("=")
    assert name == f"corral_session_{proxy.server.port}"
    assert token not in cookie
    assert page_token not in cookie
    assert all(name in rest for name in ("HttpOnly", "SameSite=Strict", "Path=/corral"))
    assert (await sign_in(proxy, token=token))[1]["error"]["code"] == "invalid_token"
    async with proxy.http.get(URL) as response:
        assert (await response.json())["signed_in"] is True
    assert await post(proxy, f"{URL}/end", **origin(proxy)) == 200
    async with proxy.http.get(URL) as response:
        assert await response.json() == {"signed_in": False, "has_keys": False}


async def test_tabs_work_beside_each_other_until_one_signs_out(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    first = proxy.http.headers[PAGE_TOKEN]
    await signed_in(proxy)
    second = proxy.http.headers[PAGE_TOKEN]
    assert first != second
    for page_token in (first, second, first):
        async with proxy.http.get(URL, headers={PAGE_TOKEN: page_token}) as response:
            assert (await response.json())["signed_in"] is True
    assert await post(proxy, f"{URL}/end", **origin(proxy), **{PAGE_TOKEN: first}) == 200
    async with proxy.http.get("/corral/v1/logs", headers={PAGE_TOKEN: second}) as response:
        assert response.status == 401


async def test_a_cookie_without_the_page_token_is_refused(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    page_token = proxy.http.headers.pop(PAGE_TOKEN)
    for given in ({}, {PAGE_TOKEN: "guess"}):
        for path in (URL, "/corral/v1/logs", "/corral/v1/live", "/corral/v1/caches"):
            async with proxy.http.get(path, headers=given) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["code"] == "session_required"
        assert await post(proxy, f"{URL}/end", **origin(proxy), **given) == 401
        assert await post(proxy, "/corral/v1/models/chat/load", **origin(proxy), **given) == 401
        assert await post(proxy, FORGET, **origin(proxy), **given) == 401
    async with proxy.http.get("/corral/v1/logs", headers={PAGE_TOKEN: page_token}) as response:
        assert response.status == 200
    async with proxy.http.get("/corral/") as response:
        assert response.status == 200


async def test_only_the_page_itself_uses_a_session(proxy: ProxyHarness) -> None:
    await signed_in(proxy)
    cancel = "/corral/v1/requests/none/cancel"
    assert await post(proxy, cancel, **origin(proxy)) == 404
    for headers in (
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # the same site, but not the same origin
        {**origin(proxy), "Sec-Fetch-Site": "same-site"},
        {**origin(proxy), "Sec-Fetch-Site": "cross-site"},
        {**origin(proxy), "Host": "evil.example"},
    ):
        for path in (cancel, FORGET):
            assert await post(proxy, path, **headers) == 403, headers
    for path in (cancel, FORGET):
        async with proxy.http.post(path, data="{}", headers=origin(proxy)) as response:
            assert response.status == 415
    assert await post(proxy, FORGET, **origin(proxy)) == 404
    async with proxy.http.get(URL, headers={"Sec-Fetch-Site": "same-site"}) as response:
        assert response.status == 403
    assert await post(proxy, URL, Origin="http://127.0.0.1:1") == 403


async def test_a_page_on_an_address_of_the_network_is_its_own(proxy: ProxyHarness) -> None:
    await proxy.server.close()
    await proxy.open(listen="0.0.0.0:0")
    host = f"192.0.2.7:{proxy.server.port}"
    assert await post(proxy, URL, Host=host, Origin=f"http://{host}") == 400  # no token
    assert await post(proxy, URL, Host=host, Origin="http://192.0.2.8") == 403


async def test_behind_a_reverse_proxy_with_tls_the_cookie_is_for_tls(proxy: ProxyHarness) -> None:
    await proxy.server.close()
    await proxy.open(allowed_hosts=("corral.example.com",))
    assert proxy.sessions
    headers = {"Host": "corral.example.com", "Origin": "https://corral.example.com"}
    body = {"token": proxy.sessions.new_token()}
    async with proxy.http.post(URL, json=body, headers=headers) as response:
        assert response.status == 200
        cookie = response.headers["Set-Cookie"]
    assert cookie.startswith("__Host-corral_session=")
    assert "; Secure" in cookie
    assert "Path=/;" in cookie


@pytest.mark.parametrize("members", [{}, {"token": "x", "more": "y"}, {"key": "x"}])
async def test_invalid_tokens_sign_nobody_in(proxy: ProxyHarness, members: dict[str, str]) -> None:
    status, _ = await sign_in(proxy, **members)
    assert status == (401 if "token" in members else 400)


async def test_wrong_tokens_are_limited(proxy: ProxyHarness) -> None:
    statuses = [(await sign_in(proxy, token="guess"))[0] for _ in range(11)]
    assert statuses == [401] * 10 + [429]


async def test_a_guesser_does_not_lock_out_who_has_a_token(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await with_keys(proxy, tmp_path)
    statuses = [(await sign_in(proxy, token="guess"))[0] for _ in range(20)]
    assert statuses[-1] == 429
    assert (await sign_in(proxy, api_key="corral-admin-123"))[0] == 200


async def test_with_keys_an_admin_signs_in_and_others_are_refused(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await with_keys(proxy, tmp_path)
    for key, status in (("corral-laptop-12", 403), ("corral-wrong-123", 401)):
        assert (await sign_in(proxy, api_key=key))[0] == status
    async with proxy.http.get("/corral/v1/requests") as response:
        assert response.status == 401
    for key, status in (("corral-laptop-12", 403), ("corral-admin-123", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("/corral/v1/logs", "/corral/v1/caches"):
            async with proxy.http.get(path, headers=headers) as response:
                assert response.status == status
    assert await post(proxy, FORGET, Authorization="Bearer corral-laptop-12") == 403
    status, body = await sign_in(proxy, api_key="corral-admin-123")
    assert (status, body["client"], body["has_keys"]) == (200, "root", True)
    keep(proxy, body)
    async with proxy.http.get("/corral/v1/requests") as response:
        assert response.status == 200


async def test_a_session_chats_below_corral_alone(proxy: ProxyHarness, tmp_path: Path) -> None:
    await with_keys(proxy, tmp_path)
    await proxy.fake()
    await signed_in(proxy)
    for path, status in (("/corral/v1/chat/completions", 200), ("/v1/chat/completions", 401)):
        async with proxy.http.post(path, json=CHAT, headers=origin(proxy)) as response:
            assert response.status == status


async def test_without_a_dashboard_there_is_none(proxy: ProxyHarness) -> None:
    await proxy.server.close()
    await proxy.open(dashboard=False)
    for path in ("/corral/", URL):
        async with proxy.http.get(path) as response:
            assert response.status == 404
