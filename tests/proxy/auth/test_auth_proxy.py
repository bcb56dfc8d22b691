"""Users whom a reverse proxy has signed in: by its addresses and header fields alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from pydantic import ValidationError
from support.proxy_harness import CHAT, ProxyHarness

from proxy.auth.api_keys import ApiKeys
from proxy.auth.auth_proxy import AuthProxy
from proxy.auth.keys_file import Key
from proxy.errors import ConfigError, Forbidden, Unauthorized
from proxy.http.middleware import check
from proxy.settings import AuthProxySettings, ProxySettings

KEYS = """
[keys.admins]
key = "corral-admin-123"
admin = true
[keys.lab]
key = "corral-lab-12345"
models = ["chat"]
requests_per_minute = 2
"""
ROLES = {"corral-admins": "admins", "lab": "lab"}
HERE, ELSEWHERE = "127.0.0.1", "10.9.8.7"
ALICE = {"X-Forwarded-User": "alice@example.com", "X-Forwarded-Groups": "staff, corral-admins,lab"}
BOB = {"X-Forwarded-User": "bob", "X-Forwarded-Groups": "lab"}
ADMIN_PATH = "/corral/v1/logs"


async def opened(proxy: ProxyHarness, directory: Path, address: str = HERE, **more: Any) -> None:
    path = directory / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS, "utf-8")
    auth = AuthProxySettings(addresses=(address,), **{"roles": ROLES, **more})
    await proxy.server.close()
    await proxy.open(api_keys_file=path, auth_proxy=auth, allowed_hosts=("corral.example.com",))


async def status(proxy: ProxyHarness, fields: Any, path: str = ADMIN_PATH) -> int:
    async with proxy.http.get(path, headers=fields) as response:
        await response.read()
        return response.status


async def test_a_user_has_the_rights_of_the_first_role_of_its_groups(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await opened(proxy, tmp_path)
    await proxy.fake()
    assert await status(proxy, ALICE) == 200
    assert await status(proxy, BOB) == 403
    assert await status(proxy, BOB, "/v1/models") == 200
    assert await status(proxy, {"X-Forwarded-User": "eve"}, "/v1/models") == 403
    assert await status(proxy, {"X-Forwarded-Groups": "corral-admins"}) == 401
    async with proxy.http.post("/v1/chat/completions", json=CHAT, headers=ALICE) as response:
        assert response.status == 200
    (finished,) = proxy.events("request.finished")
    assert finished["client"] == "user:alice@example.com"


async def test_users_of_one_role_have_its_limits_each(proxy: ProxyHarness, tmp_path: Path) -> None:
    await opened(proxy, tmp_path)
    assert [await status(proxy, BOB, "/v1/models") for _ in range(3)] == [200, 200, 429]
    assert await status(proxy, {**BOB, "X-Forwarded-User": "carol"}, "/v1/models") == 200


async def test_fields_from_another_address_are_ignored(proxy: ProxyHarness, tmp_path: Path) -> None:
    await opened(proxy, tmp_path, ELSEWHERE)
    assert await status(proxy, ALICE) == 401
    # A claim to come from the address is one more field of the client.
    claims = {"X-Forwarded-For": ELSEWHERE, "X-Real-IP": ELSEWHERE, "Forwarded": f"for={ELSEWHERE}"}
    assert await status(proxy, {**ALICE, **claims}) == 401
    key = {"Authorization": "Bearer corral-lab-12345"}
    assert await status(proxy, {**ALICE, **key}) == 403  # the rights of the key, and no others
    assert await status(proxy, {**ALICE, **key}, "/v1/models") == 200


@pytest.mark.parametrize("name", ["X-Forwarded-User", "X-Forwarded-Groups"])
async def test_two_fields_of_one_name_are_refused(
    proxy: ProxyHarness, tmp_path: Path, name: str
) -> None:
    await opened(proxy, tmp_path)
    twice = CIMultiDict(BOB)
    twice.add(name, ALICE[name])
    assert await status(proxy, twice) == 401


@pytest.mark.parametrize("name", ["", "a,b", "bob, alice@example.com", "a b", "é", "x" * 129, "-a"])
async def test_a_text_that_is_no_name_is_refused(
    proxy: ProxyHarness, tmp_path: Path, name: str
) -> None:
    await opened(proxy, tmp_path)
    assert await status(proxy, {**ALICE, "X-Forwarded-User": name}) == 401


async def test_a_user_named_as_a_key_is_not_that_key(proxy: ProxyHarness, tmp_path: Path) -> None:
    await opened(proxy, tmp_path)
    fields = {"X-Forwarded-User": "admins", "X-Forwarded-Groups": "lab"}
    assert await status(proxy, fields) == 403
    assert await status(proxy, {**BOB, "Authorization": "Bearer corral-admin-123"}) == 403


async def test_other_fields_can_be_named(proxy: ProxyHarness, tmp_path: Path) -> None:
    names = {"user_header": "X-Auth-Request-Email", "groups_header": "X-Auth-Request-Groups"}
    await opened(proxy, tmp_path, **names)
    fields = {"X-Auth-Request-Email": "a@b.c", "X-Auth-Request-Groups": "corral-admins"}
    assert await status(proxy, fields) == 200
    assert await status(proxy, ALICE) == 401


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 200),
        ({"Origin": "https://corral.example.com", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        # Allowed with a key, which such a page would have to know.
        ({"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
    ],
)
async def test_a_page_of_another_site_cannot_use_a_users_identity(
    proxy: ProxyHarness, tmp_path: Path, fields: dict[str, str], expected: int
) -> None:
    await opened(proxy, tmp_path)
    host = {"Host": "corral.example.com"}
    assert await status(proxy, {**ALICE, **host, **fields}) == expected


async def test_the_redirect_of_an_identity_provider_opens_the_dashboard(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await opened(proxy, tmp_path)
    came = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    came["Sec-Fetch-Dest"] = "document"
    assert await status(proxy, {**ALICE, **came}, "/corral/") == 200
    assert await status(proxy, {**ALICE, **came}, ADMIN_PATH) == 403
    framed = {**came, "Sec-Fetch-Dest": "iframe"}
    assert await status(proxy, {**ALICE, **framed}, "/corral/") == 403
    await opened(proxy, tmp_path, ELSEWHERE)
    assert await status(proxy, {**ALICE, **came}, "/corral/") == 403


async def test_the_page_knows_whether_the_user_is_signed_in(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    await opened(proxy, tmp_path)
    for fields, expected in ((ALICE, True), (BOB, False), ({}, False)):
        async with proxy.http.get("/corral/v1/session", headers=fields) as response:
            answer = await response.json()
        assert answer["signed_in"] is expected
        name = fields.get("X-Forwarded-User")
        assert answer.get("client") == (f"user:{name}" if name else None)


def request_from(address: str) -> web.Request:
    request = make_mocked_request("GET", "/", ALICE)
    return request.clone(remote=address)


@pytest.mark.parametrize(
    ("address", "is_sender"),
    [
        *[(address, True) for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::7")],
        *[(address, False) for address in ("10.1.3.1", "127.0.0.1", "::1", "", "proxy.lan")],
    ],
)
def test_addresses_are_networks_of_both_versions(address: str, *, is_sender: bool) -> None:
    settings = AuthProxySettings(addresses=("10.1.2.0/24", "fd00::/8"), roles={"*": "all"})
    auth = AuthProxy(settings)
    assert auth.is_sender(request_from(address)) is is_sender
    found = auth.key_of(request_from(address), [Key("all", b"1", max_in_flight=3)])
    name = "user:alice@example.com"
    assert found == (Key(name, b"", max_in_flight=3) if is_sender else None)


def test_a_role_that_leaves_the_file_ends_the_rights_of_its_users() -> None:
    auth = AuthProxy(AuthProxySettings(addresses=("::1",), roles={"*": "all"}))
    keys, name = [Key("all", b"1")], "user:alice@example.com"
    assert auth.find_key(name, keys) is None
    assert auth.key_of(request_from("::1"), keys)
    assert auth.find_key(name, keys) == Key(name, b"")
    assert auth.find_key(name, []) is None
    with pytest.raises(Forbidden, match=r"no \[keys.all\]"):
        auth.key_of(request_from("::1"), [])


def test_users_are_remembered_in_bounds() -> None:
    auth = AuthProxy(AuthProxySettings(addresses=("::1",), roles={"*": "all"}))
    keys = [Key("all", b"1")]
    request = Mock(remote="::1")
    for number in range(5000):
        request.headers = CIMultiDict({"X-Forwarded-User": f"u{number}"})
        auth.key_of(request, keys)
    assert not auth.find_key("user:u0", keys)
    assert auth.find_key("user:u4999", keys)
    assert len(auth._roles) == 4096


def test_users_with_token_limits_are_remembered_in_bounds(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.all]\nkey = "some-key"\ntokens_per_minute = 5\n')
    path.chmod(0o600)
    keys = ApiKeys(
        path, Mock(), auth_proxy=AuthProxySettings(addresses=("::1",), roles={"*": "all"})
    )
    request = Mock(remote="::1")
    for number in range(4100):
        request.headers = CIMultiDict({"X-Forwarded-User": f"u{number}"})
        keys.key_of(request)
    assert len(keys.limited) <= 4098
    assert {"all", "user:u4099"} <= keys.limited.keys()


def test_a_very_long_list_of_groups_is_refused() -> None:
    auth = AuthProxy(AuthProxySettings(addresses=("::1",), roles={"*": "all"}))
    fields = {"X-Forwarded-User": "a", "X-Forwarded-Groups": "x" * 20_000}
    with pytest.raises(Unauthorized):
        auth.key_of(make_mocked_request("GET", "/", fields).clone(remote="::1"), [])


@pytest.mark.parametrize("address", ["0.0.0.0/0", "::/0", "10.1.2.3/24", "proxy.lan"])
def test_addresses_that_mean_anybody_or_nothing_are_refused(address: str) -> None:
    with pytest.raises(ValidationError):
        AuthProxySettings(addresses=(address,), roles={"*": "all"})


def test_roles_are_entries_of_a_keys_file(tmp_path: Path) -> None:
    auth = AuthProxySettings(addresses=(HERE,), roles={"*": "nobody"})
    with pytest.raises(ValidationError, match="set api_keys_file"):
        ProxySettings(auth_proxy=auth)
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS, "utf-8")
    with pytest.raises(ConfigError, match=r"has no \[keys.nobody\]"):
        check(ProxySettings(auth_proxy=auth, api_keys_file=path))
