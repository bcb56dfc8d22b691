"""Which pages of a browser may ask, and which hosts are this machine."""

import socket

import pytest
from fakes.proxy_harness import ProxyHarness

from proxy.auth import origin as origin_module
from proxy.endpoints import ENDPOINTS, EndpointKind
from proxy.errors import ConfigError


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080"])
async def test_this_machines_own_names_pass(proxy: ProxyHarness, host: str) -> None:
    async with proxy.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io", "192.168.0.7:8080"]
)
async def test_a_name_that_merely_leads_here_is_refused(proxy: ProxyHarness, host: str) -> None:
    async with proxy.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "forbidden"


async def test_on_a_public_address_only_addresses_and_this_machines_names_pass(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.home.lan")
    await proxy.open(host="0.0.0.0")  # noqa: S104 (what is tested)
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
async def test_local_pages_and_desktop_applications_may_ask(
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
async def test_pages_from_elsewhere_may_not(proxy: ProxyHarness, origin: str) -> None:
    fake = await proxy.fake()
    async with proxy.http.post("/tokenize", json={}, headers={"Origin": origin}) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
    assert fake.calls.empty()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("page", ["/health", "/v1/models", "/props", "/tokenize", "/nothing"])
async def test_a_page_of_another_site_that_names_no_origin_may_not_ask(
    proxy: ProxyHarness, method: str, page: str
) -> None:
    """Browsers send no Origin with a picture, a script, a frame or a link."""
    fake = await proxy.fake()
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    async with proxy.http.request(method, page, headers=headers) as response:
        assert response.status == 403
        if method != "HEAD":
            assert "another site" in (await response.json())["error"]["message"]
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
async def test_what_a_person_or_a_page_of_ours_asks_for_is_answered(
    proxy: ProxyHarness, headers: dict[str, str]
) -> None:
    async with proxy.http.get("/health", headers=headers) as response:
        assert response.status == 200


async def test_a_preflight_is_answered_by_us(proxy: ProxyHarness) -> None:
    headers = {
        "Origin": "tauri://localhost",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "tauri://localhost"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


async def test_a_preflight_from_elsewhere_is_refused(proxy: ProxyHarness) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    async with proxy.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("nas", False)],  # noqa: S104 (only read)
)
def test_loopback_is_known_by_address(host: str, expected: bool) -> None:  # noqa: FBT001 (a table)
    assert origin_module.is_loopback(host) is expected


async def test_a_host_that_is_set_is_this_machine_too(proxy: ProxyHarness) -> None:
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


async def test_on_a_public_address_hosts_that_are_set_are_the_only_names(
    proxy: ProxyHarness,
) -> None:
    await proxy.open(host="0.0.0.0", allowed_hosts=("corral.lan",))  # noqa: S104 (what is tested)
    for host, status in (
        ("corral.lan:8080", 200),
        ("localhost", 200),
        ("192.168.0.7:8080", 200),
        ("[fe80::1]:8080", 200),
        ("rebound.evil.example", 403),
    ):
        async with proxy.http.get("/health", headers={"Host": host}) as response:
            assert response.status == status, host


async def test_an_origin_that_is_set_may_ask(proxy: ProxyHarness) -> None:
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
    "origin", ["*", "chat.example.com", "https://a/b", "https://*.*.lan", "https://", "a b://c", ""]
)
def test_what_is_no_origin_is_refused_before_anybody_asks(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.allowed_origins") as error:
        origin_module.origins_of((origin,))
    assert "https://chat.example.com" in error.value.hint


@pytest.mark.parametrize("host", ["*", "https://nas", "a b", "nas:http", ""])
def test_what_is_no_host_is_refused_before_anybody_asks(host: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.allowed_hosts"):
        origin_module.hosts_of((host,))


async def test_an_old_chromium_hears_that_this_network_may_be_asked(proxy: ProxyHarness) -> None:
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


def test_nothing_is_changed_by_looking_at_it() -> None:
    assert set(ENDPOINTS) == {"GET", "POST"}
    assert set(ENDPOINTS["GET"].values()) == {EndpointKind.INFO}
