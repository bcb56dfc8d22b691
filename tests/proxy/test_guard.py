"""Which pages of a browser may ask, and which hosts are this machine."""

import pytest
from fakes.house import House

from proxy import guard


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080"])
async def test_this_machines_own_names_pass(house: House, host: str) -> None:
    async with house.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io", "192.168.0.7:8080"]
)
async def test_a_name_that_merely_leads_here_is_refused(house: House, host: str) -> None:
    async with house.http.get("/health", headers={"Host": host}) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "forbidden"


async def test_on_a_public_address_any_host_passes(house: House) -> None:
    await house.open(host="0.0.0.0")  # noqa: S104 (what is tested)
    async with house.http.get("/health", headers={"Host": "corral.lan"}) as response:
        assert response.status == 200


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
    ],
)
async def test_local_pages_and_desktop_applications_may_ask(house: House, origin: str) -> None:
    async with house.http.get("/health", headers={"Origin": origin}) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == origin
        assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "", "file://"]
)
async def test_pages_from_elsewhere_may_not(house: House, origin: str) -> None:
    fake = await house.fake()
    async with house.http.post("/tokenize", json={}, headers={"Origin": origin}) as response:
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers
    assert fake.calls.empty()


async def test_a_preflight_is_answered_by_us(house: House) -> None:
    headers = {
        "Origin": "tauri://localhost",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    async with house.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "tauri://localhost"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


async def test_a_preflight_from_elsewhere_is_refused(house: House) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    async with house.http.options("/v1/chat/completions", headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("nas", False)],  # noqa: S104 (only read)
)
def test_loopback_is_known_by_address(host: str, expected: bool) -> None:  # noqa: FBT001 (a table)
    assert guard.is_loopback(host) is expected
