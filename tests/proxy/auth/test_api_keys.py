"""Which requests a key allows."""

import asyncio
import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from support.proxy_harness import CHAT, ProxyHarness, model_info
from support.upstream import Call, say_ok

from proxy.auth.api_keys import ApiKeys, find
from proxy.auth.keys_file import Key, parse_keys
from proxy.errors import ConfigError, Unauthorized
from proxy.request.models import visible_models

ME, TOOLS = "corral-me-1234", "corral-tools-1234"
FILE = (
    f'[keys.me]\nkey = "{ME}"\n'
    f'[keys.tools]\nkey = "{TOOLS}"\nmodels = ["chat"]\npriority = "batch"\nmax_in_flight = 1\n'
)
OPEN_PATHS = ["/health", "/v1/health", "/health/live"]
OWN = Key("own", hashlib.sha256(b"corral-own-1234").digest())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", FILE)


@pytest.fixture
async def locked(proxy: ProxyHarness, path: Path) -> ProxyHarness:
    """A proxy that requires an API key."""
    await proxy.open(api_keys_file=path)
    return proxy


def write(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text, "utf-8")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ME),
        {"Authorization": f"bearer   {ME}"},
        {"X-Api-Key": ME},
        {**bearer(ME), "X-Api-Key": ME},
    ],
    ids=str,
)
async def test_a_known_key_is_accepted(locked: ProxyHarness, headers: dict[str, str]) -> None:
    async with locked.http.get("/v1/models", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "has no API key"),
        ({"X-Api-Key": ""}, "has no API key"),
        (bearer("corral-nobody"), "unknown API key"),
        (bearer(ME + "x"), "unknown API key"),
        (bearer("\N{SNOWMAN}"), "unknown API key"),
        ({"X-Api-Key": ME[:-1]}, "unknown API key"),
        ({"Authorization": "Basic bWU6bWU="}, "invalid Authorization"),
        ({"Authorization": f"Bearer {ME} {ME}"}, "invalid Authorization"),
        ({**bearer(ME), "X-Api-Key": TOOLS}, "two different API keys"),
    ],
    ids=str,
)
async def test_any_other_key_is_rejected(
    locked: ProxyHarness, headers: dict[str, str], expected: str
) -> None:
    fake = await locked.fake()
    async with locked.http.post("/tokenize", json={}, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
    assert error["code"] == "invalid_api_key"
    assert expected in error["message"]
    assert ME not in error["message"]
    assert fake.calls.empty()
    assert locked.events("request.rejected")[0]["status"] == 401


async def test_an_anthropic_client_gets_its_own_error_type(locked: ProxyHarness) -> None:
    async with locked.http.post("/v1/messages", json=CHAT) as response:
        assert (await response.json())["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("url", OPEN_PATHS)
async def test_health_needs_no_key(locked: ProxyHarness, url: str) -> None:
    async with locked.http.get(url) as response:
        assert response.status == 200


async def test_health_has_figures_only_with_a_key(locked: ProxyHarness) -> None:
    for headers, names in (
        ({}, {"status"}),
        (bearer("corral-nobody"), {"status"}),
        (bearer(ME), {"status", "models", "slots_idle", "slots_processing"}),
    ):
        async with locked.http.get("/health", headers=headers) as response:
            assert set(await response.json()) == names


async def test_health_counts_against_no_limit(locked: ProxyHarness, path: Path) -> None:
    write(path, f'[keys.me]\nkey = "{ME}"\nrequests_per_minute = 1\n')
    await locked.open()
    for _ in range(3):
        async with locked.http.get("/health", headers=bearer(ME)) as response:
            assert response.status == 200


@pytest.mark.parametrize("url", ["/v1/models", "/nothing", "/slots", "/props", "/metrics"])
async def test_every_other_path_needs_a_key(locked: ProxyHarness, url: str) -> None:
    async with locked.http.get(url) as response:
        assert response.status == 401


async def test_a_preflight_needs_no_key_and_a_401_has_cors_headers(locked: ProxyHarness) -> None:
    origin = {"Origin": "tauri://localhost"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    async with locked.http.options("/v1/models", headers=preflight) as response:
        assert response.status == 200
    async with locked.http.get("/v1/models", headers=origin) as response:
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == "tauri://localhost"


async def test_a_key_never_reaches_an_instance(locked: ProxyHarness) -> None:
    fake = await locked.fake()
    headers = {**bearer(ME), "X-Api-Key": ME}
    async with locked.http.post("/tokenize", json={}, headers=headers) as response:
        assert response.status == 200
    call = await fake.calls.get()
    assert call.headers["Authorization"] == "Bearer inner"
    assert ME not in str(call.headers)


async def test_a_key_hides_the_models_it_cannot_use(locked: ProxyHarness) -> None:
    await locked.fake()
    locked.loader.model_infos = [model_info("chat"), model_info("secret")]
    async with locked.http.get("/v1/models", headers=bearer(TOOLS)) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["chat"]
    async with locked.http.get("/v1/models/secret", headers=bearer(TOOLS)) as response:
        assert response.status == 404
    asked = {**CHAT, "model": "secret"}
    async with locked.http.post("/tokenize", json=asked, headers=bearer(TOOLS)) as response:
        assert response.status == 404
        assert "available models: chat)" in (await response.json())["error"]["message"]
    async with locked.http.get("/v1/models", headers=bearer(ME)) as response:
        assert len((await response.json())["data"]) == 2


async def test_a_key_at_its_limit_gets_429_with_retry_after(locked: ProxyHarness) -> None:
    may_end = asyncio.Event()

    async def wait(call: Call) -> None:
        await may_end.wait()
        await say_ok(call)

    fake = await locked.fake(wait)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(post(locked, TOOLS))
        await fake.calls.get()
        async with locked.http.post("/tokenize", json={}, headers=bearer(TOOLS)) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "max_in_flight" in (await response.json())["error"]["message"]
        may_end.set()
    assert first.result() == 200
    assert await post(locked, TOOLS) == 200


async def post(proxy: ProxyHarness, key: str) -> int:
    async with proxy.http.post("/tokenize", json={}, headers=bearer(key)) as response:
        return response.status


async def test_the_client_is_the_keys_name_and_batch_stays_batch(
    locked: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Any] = []
    lease = locked.router.lease

    def note(request: Any, *more: Any) -> Any:
        requests.append(request)
        return lease(request, *more)

    monkeypatch.setattr(locked.router, "lease", note)
    await locked.fake()
    for key, priority in ((ME, ""), (ME, "batch"), (TOOLS, "interactive")):
        headers = {**bearer(key), "X-Corral-Priority": priority}
        async with locked.http.post("/tokenize", json={}, headers=headers) as response:
            assert response.status == 200
    assert [(request.client, request.priority) for request in requests] == [
        ("me", "interactive"),
        ("me", "batch"),
        ("tools", "batch"),
    ]


@pytest.mark.parametrize(("given", "found"), [(ME, "me"), (TOOLS, "tools"), ("", None)])
def test_every_key_is_compared_whichever_matches(
    given: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = parse_keys(FILE.encode(), Path("keys.toml"))
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def note(given: bytes, digest: bytes) -> bool:
        compared.append(digest)
        return compare(given, digest)

    monkeypatch.setattr(hmac, "compare_digest", note)
    key = find(given, keys)
    assert (key and key.name) == found
    assert compared == [key.digest for key in keys]


def test_a_key_can_name_a_model_by_its_alias() -> None:
    (key,) = parse_keys(b'[keys.a]\nkey="12345678"\nmodels=["vendor/chat"]', Path("keys.toml"))
    assert [
        model.id for model in visible_models([model_info("chat"), model_info("other")], key)
    ] == ["chat"]


def test_an_unreadable_keys_file_is_a_config_error(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        KeysWithClock(path)


class KeysWithClock:
    """ApiKeys with a clock that moves a second for each check, and the events."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.events: list[tuple[str, object]] = []
        self._keykeys = ApiKeys(path, self._record, lambda: self.now_s)

    def accepts(self, key: str) -> bool:
        self.now_s += 1
        return self.accepts_at_once(key)

    def accepts_at_once(self, key: str) -> bool:
        request = make_mocked_request("GET", "/v1/models", headers=bearer(key))
        try:
            return self._keykeys.key_of(request) is not None
        except Unauthorized:
            return False

    def _record(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields["reason"]))


def test_a_key_removed_from_the_file_is_rejected(path: Path) -> None:
    keys = KeysWithClock(path)
    assert keys.accepts(ME)
    write(path, f'[keys.new]\nkey = "{ME}-new"')
    assert keys.accepts_at_once(ME)  # the file is checked once a second
    assert not keys.accepts(ME)
    assert keys.accepts(f"{ME}-new")
    assert keys.events == []


def test_the_headers_of_a_known_key_are_remembered_until_the_file_changes(path: Path) -> None:
    keys = KeysWithClock(path)
    for _ in range(2):
        assert keys.accepts(ME)
        assert keys.accepts(TOOLS)
        assert not keys.accepts(f"{ME}x")
    write(path, f'[keys.tools]\nkey = "{ME}"')
    assert keys.accepts(ME)
    assert not keys.accepts(TOOLS)


@pytest.mark.parametrize("harm", ["broken", "open", "gone"])
def test_an_unreadable_file_leaves_the_keys_unchanged_and_is_reported_once(
    path: Path, harm: str
) -> None:
    keys = KeysWithClock(path)
    match harm:
        case "broken":
            write(path, "[keys.")
        case "open":
            path.chmod(0o644)
        case "gone":
            path.unlink()
    assert keys.accepts(ME)
    assert keys.accepts(ME)
    assert [name for name, _ in keys.events] == ["settings.rejected"]
    assert str(path) in str(keys.events[0][1])
    path.unlink(missing_ok=True)
    write(path, f'[keys.new]\nkey = "{ME}-new"')
    assert not keys.accepts(ME)


@pytest.mark.parametrize("with_file", [False, True])
def test_a_key_that_is_in_no_file_is_valid_beside_those_of_the_file(
    path: Path, *, with_file: bool
) -> None:
    keys = ApiKeys(path if with_file else None, lambda *_, **__: None, own_key=OWN)
    own = make_mocked_request("GET", "/", bearer("corral-own-1234"))
    assert keys.are_needed
    assert keys.key_of(own) is keys.find_key("own") is OWN
    with pytest.raises(Unauthorized):
        keys.key_of(make_mocked_request("GET", "/", bearer("corral-wrong-1234")))
    assert (keys.find_key("me") is not None) == with_file
