"""Who is let in by which key, and what that key may."""

import asyncio
import hmac
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from fakes.proxy_harness import CHAT, ProxyHarness, model_info
from fakes.upstream import Call, say_ok

from proxy.auth.api_keys import ApiKeys, find, visible
from proxy.auth.keys_file import parse_keys
from proxy.errors import ConfigError, Unauthorized

ME, TOOLS = "corral-me-1234", "corral-tools-1234"
FILE = (
    f'[keys.me]\nkey = "{ME}"\n'
    f'[keys.tools]\nkey = "{TOOLS}"\nmodels = ["chat"]\npriority = "batch"\nmax_in_flight = 1\n'
)
OPEN_PAGES = ["/health", "/v1/health"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", FILE)


@pytest.fixture
async def locked(proxy: ProxyHarness, path: Path) -> ProxyHarness:
    """Return the house with a lock on its door."""
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
async def test_a_known_key_opens(locked: ProxyHarness, headers: dict[str, str]) -> None:
    async with locked.http.get("/v1/models", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "no API key came"),
        ({"X-Api-Key": ""}, "no API key came"),
        (bearer("corral-nobody"), "not one of ours"),
        (bearer(ME + "x"), "not one of ours"),
        (bearer("\N{SNOWMAN}"), "not one of ours"),
        ({"X-Api-Key": ME[:-1]}, "not one of ours"),
        ({"Authorization": "Basic bWU6bWU="}, "not Bearer"),
        ({"Authorization": f"Bearer {ME} {ME}"}, "not Bearer"),
        ({**bearer(ME), "X-Api-Key": TOOLS}, "two API keys"),
    ],
    ids=str,
)
async def test_anything_else_does_not(
    locked: ProxyHarness, headers: dict[str, str], said: str
) -> None:
    fake = await locked.fake()
    async with locked.http.post("/tokenize", json={}, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
    assert error["code"] == "invalid_api_key"
    assert said in error["message"]
    assert ME not in error["message"]
    assert fake.calls.empty()
    assert locked.events("request.rejected")[0]["status"] == 401


async def test_an_anthropic_client_is_told_in_its_own_words(locked: ProxyHarness) -> None:
    async with locked.http.post("/v1/messages", json=CHAT) as response:
        assert (await response.json())["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("page", OPEN_PAGES)
async def test_health_is_for_everybody(locked: ProxyHarness, page: str) -> None:
    async with locked.http.get(page) as response:
        assert response.status == 200


async def test_health_tells_figures_only_to_who_has_a_key(locked: ProxyHarness) -> None:
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


@pytest.mark.parametrize("page", ["/v1/models", "/nothing", "/slots", "/props", "/metrics"])
async def test_no_other_page_is(locked: ProxyHarness, page: str) -> None:
    async with locked.http.get(page) as response:
        assert response.status == 401


async def test_a_browser_may_ask_first_and_sees_reason_it_was_refused(locked: ProxyHarness) -> None:
    origin = {"Origin": "tauri://localhost"}
    asks = {**origin, "Access-Control-Request-Method": "POST"}
    async with locked.http.options("/v1/models", headers=asks) as response:
        assert response.status == 204
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


async def test_for_a_key_there_are_only_the_models_it_may_use(locked: ProxyHarness) -> None:
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


async def test_a_key_at_its_limit_is_told_when_to_come_back(locked: ProxyHarness) -> None:
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


async def test_who_has_a_key_is_its_name_and_batch_stays_batch(
    locked: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: list[Any] = []
    lease = locked.router.lease

    def note(ask: Any, *more: Any) -> Any:
        asks.append(ask)
        return lease(ask, *more)

    monkeypatch.setattr(locked.router, "lease", note)
    await locked.fake()
    for key, priority in ((ME, ""), (ME, "batch"), (TOOLS, "interactive")):
        headers = {**bearer(key), "X-Corral-Priority": priority}
        async with locked.http.post("/tokenize", json={}, headers=headers) as response:
            assert response.status == 200
    assert [(ask.client, ask.priority) for ask in asks] == [
        ("me", "interactive"),
        ("me", "batch"),
        ("tools", "batch"),
    ]


@pytest.mark.parametrize(("given", "found"), [(ME, "me"), (TOOLS, "tools"), ("", None)])
def test_every_key_is_compared_whichever_it_is(
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
    assert compared == [one.digest for one in keys]


def test_a_model_may_be_meant_by_an_alias() -> None:
    (key,) = parse_keys(b'[keys.a]\nkey="12345678"\nmodels=["vendor/chat"]', Path("keys.toml"))
    assert [one.id for one in visible([model_info("chat"), model_info("other")], key)] == ["chat"]


def test_a_proxy_whose_keys_cannot_be_read_is_not_built(path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        Ring(path)


class Ring:
    """A keyring with a clock that stands still until it is set, and what it told."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.told: list[tuple[str, object]] = []
        self._keyring = ApiKeys(path, self._hear, lambda: self.now_s)

    def takes(self, key: str) -> bool:
        """Ask a second later than before."""
        self.now_s += 1
        return self.takes_at_once(key)

    def takes_at_once(self, key: str) -> bool:
        request = make_mocked_request("GET", "/v1/models", headers=bearer(key))
        try:
            return self._keyring.key_of(request) is not None
        except Unauthorized:
            return False

    def _hear(self, name: str, /, **fields: object) -> None:
        self.told.append((name, fields["reason"]))


def test_a_key_that_is_taken_out_of_the_file_is_refused_from_then_on(path: Path) -> None:
    ring = Ring(path)
    assert ring.takes(ME)
    write(path, f'[keys.new]\nkey = "{ME}-new"')
    assert ring.takes_at_once(ME)  # the file is looked at once a second
    assert not ring.takes(ME)
    assert ring.takes(f"{ME}-new")
    assert ring.told == []


@pytest.mark.parametrize("harm", ["broken", "open", "gone"])
def test_a_file_that_breaks_leaves_the_keys_as_they_were_and_is_told_once(
    path: Path, harm: str
) -> None:
    ring = Ring(path)
    match harm:
        case "broken":
            write(path, "[keys.")
        case "open":
            path.chmod(0o644)
        case "gone":
            path.unlink()
    assert ring.takes(ME)
    assert ring.takes(ME)
    assert [name for name, _ in ring.told] == ["settings.rejected"]
    assert str(path) in str(ring.told[0][1])
    path.unlink(missing_ok=True)
    write(path, f'[keys.new]\nkey = "{ME}-new"')
    assert not ring.takes(ME)
