"""Which origins and hosts are allowed."""

import socket
import tomllib

import pytest
from support.proxy_harness import ProxyHarness

from proxy.auth import access as access_module
from proxy.common.toml_types import is_loopback
from proxy.errors import ConfigError
from proxy.upstream.endpoint_kinds import ENDPOINTS, EndpointKind


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080"])
async def test_loopback_hosts_are_allowed(proxy: ProxyHarness, host: str) -> None:
    async with proxy.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io", "192.168.0.7:8080"]
)
async def test_a_name_that_merely_resolves_to_us_is_rejected(
    proxy: ProxyHarness, host: str
) -> None:
    async with proxy.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "forbidden"


async def test_a_public_address_allows_ip_addresses_and_names_of_this_machine(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.home.lan")
    await proxy.open(listen="0.0.0.0:0")
    for host, status in (
        ("localhost:8080", 200),
        ("192.168.0.7:8080", 200),
        ("[fe80::1]:8080", 200),
        ("box.home.lan:8080", 200),
        ("BOX", 200),
        ("box.local", 200),
        ("box.evil.example", 403),
        ("corral.lan", 403),
        ("192.168.0.7.evil.example", 403),
        ("evil.example:8080", 403),
    ):
        async with proxy.http.get("/health", headers={"Host": host}) as response:
            assert response.status == status, host


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:5173",
        "tauri://localhost",
        "https://tauri.localhost",
        "app://obsidian.md",
        "vscode-webview://1a2b3c",
        "vscode-file://vscode-app",
    ],
)
async def test_local_pages_and_desktop_applications_are_allowed(
    proxy: ProxyHarness, origin: str
) -> None:
    async with proxy.http.get("/health", headers={"Origin": origin}) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == origin
        assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "",
        "file://",
        "tauri://evil.example",
        "http://tauri.localhost.evil.example",
        "app://",
        "chrome-extension://abcdef",
        "http://localhost:8080, http://evil.example",
        "http://localhost:8080/",
    ],
)
async def test_other_origins_are_rejected(proxy: ProxyHarness, origin: str) -> None:
    fake = await proxy.fake()
    async with proxy.http.post("/tokenize", json={}, headers={"Origin": origin}) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
    assert fake.calls.empty()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("page", ["/health", "/v1/models", "/props", "/tokenize", "/nothing"])
async def test_a_cross_site_request_without_an_origin_is_rejected(
    proxy: ProxyHarness, method: str, page: str
) -> None:
    """Browsers send no Origin with a picture, a script, a frame or a link."""
    fake = await proxy.fake()
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    async with proxy.http.request(method, page, headers=headers) as response:
        assert response.status == 403
        if method != "HEAD":
            assert "cross-site" in (await response.json())["error"]["message"]
    assert fake.calls.empty()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},  # typed by a person
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "same-site"},  # another port of localhost
        {"Sec-Fetch-Site": "cross-site", "Origin": "tauri://localhost"},
    ],
    ids=str,
)
async def test_navigation_and_same_site_requests_are_allowed(
    proxy: ProxyHarness, headers: dict[str, str]
) -> None:
    async with proxy.http.get("/health", headers=headers) as response:
        assert response.status == 200


async def test_the_proxy_answers_a_preflight(proxy: ProxyHarness) -> None:
    headers = {
        "Origin": "tauri://localhost",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == "tauri://localhost"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        for method in ("POST", "DELETE"):
            assert method in response.headers["Access-Control-Allow-Methods"]


async def test_a_preflight_from_another_origin_is_rejected(proxy: ProxyHarness) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("nas", False)],  # noqa: S104 (only read)
)
def test_is_loopback(host: str, expected: bool) -> None:  # noqa: FBT001 (a table)
    assert is_loopback(host) is expected


async def test_configured_hosts_are_allowed(proxy: ProxyHarness) -> None:
    await proxy.open(allowed_hosts=("corral.lan", "nas:8080"))
    for host, status in (
        ("corral.lan", 200),
        ("CORRAL.lan:443", 200),
        ("nas:8080", 200),
        ("nas", 403),
        ("corral.lan.evil.example", 403),
        ("corralxlan", 403),
        ("192.168.0.7:8080", 403),
    ):
        async with proxy.http.get("/health", headers={"Host": host}) as response:
            assert response.status == status, host


async def test_a_public_address_allows_configured_names_and_no_others(
    proxy: ProxyHarness,
) -> None:
    await proxy.open(listen="0.0.0.0:0", allowed_hosts=("corral.lan",))
    for host, status in (
        ("corral.lan:8080", 200),
        ("localhost", 200),
        ("192.168.0.7:8080", 200),
        ("[fe80::1]:8080", 200),
        ("rebound.evil.example", 403),
    ):
        async with proxy.http.get("/health", headers={"Host": host}) as response:
            assert response.status == status, host


async def test_configured_origins_are_allowed(proxy: ProxyHarness) -> None:
    named = ("https://chat.example.com", "https://*.lan:8443", "chrome-extension://*", "null")
    await proxy.open(allowed_origins=named)
    for origin, status in (
        ("https://chat.example.com", 200),
        ("HTTPS://Chat.example.com", 200),
        ("https://any.thing.lan:8443", 200),
        ("chrome-extension://abcdef", 200),
        ("null", 200),
        ("http://localhost:3000", 200),
        ("http://chat.example.com", 403),
        ("https://chat.example.com:8443", 403),
        ("https://chatxexample.com", 403),
        ("https://.lan", 403),
        ("https://evil.example/.lan:8443", 403),
        ("file://", 403),
    ):
        async with proxy.http.get("/health", headers={"Origin": origin}) as response:
            assert response.status == status, origin
            assert response.headers.get("Access-Control-Allow-Origin") == (
                origin if status == 200 else None
            )


@pytest.mark.parametrize(
    "origin",
    [
        "chrome-extension://ojopnmebhacfajjmldcnbkgflkihlfnp",
        "moz-extension://0f2d5a36-7b41-4c19-9c1e-5d0a8e6f3b27",
        "safari-web-extension://7D4C2F8E-1B3A-4E5D-9F60-A1B2C3D4E5F6",
        "capacitor://localhost",
        "ionic://localhost",
        "https://chat.example.com:8443",
        "null",
    ],
)
async def test_a_refused_origin_is_allowed_by_the_line_that_the_error_gives(
    proxy: ProxyHarness, origin: str
) -> None:
    headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    async with proxy.http.get("/health", headers=headers) as response:
        assert response.status == 403
        message = (await response.json())["error"]["message"]
    line = message.partition("write ")[2].partition(" under [proxy]")[0]
    await proxy.open(allowed_origins=tuple(tomllib.loads(line)["allowed_origins"]))
    async with proxy.http.get("/health", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == origin
    asks = {**headers, "Access-Control-Request-Method": "POST"}
    async with proxy.http.options("/v1/chat/completions", headers=asks) as response:
        assert response.status == 200
    async with proxy.http.get("/health", headers={"Origin": f"{origin}x"}) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    "origin", ["https://*.example", "https://a/b", 'https://a"]', "x", f"https://{'a' * 300}"]
)
async def test_no_line_is_given_for_an_invalid_origin(proxy: ProxyHarness, origin: str) -> None:
    async with proxy.http.get("/health", headers={"Origin": origin}) as response:
        assert response.status == 403
        assert "allowed_origins" not in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["*", "chat.example.com", "https://a/b", "https://*.*.lan", "https://", "a b://c", ""]
)
def test_an_invalid_origin_is_a_config_error(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.allowed_origins") as error:
        access_module.origins_of((origin,))
    assert "https://chat.example.com" in error.value.hint


@pytest.mark.parametrize("host", ["*", "https://nas", "a b", "nas:http", ""])
def test_an_invalid_host_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.allowed_hosts"):
        access_module.hosts_of((host,))


async def test_an_old_chromium_gets_private_network_access(proxy: ProxyHarness) -> None:
    headers = {
        "Origin": "app://obsidian.md",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.headers["Access-Control-Allow-Private-Network"] == "true"
    del headers["Access-Control-Request-Private-Network"]
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert "Access-Control-Allow-Private-Network" not in response.headers


def test_no_forwarded_get_changes_anything() -> None:
    assert set(ENDPOINTS) == {"GET", "POST"}
    assert set(ENDPOINTS["GET"].values()) == {EndpointKind.INFO}
