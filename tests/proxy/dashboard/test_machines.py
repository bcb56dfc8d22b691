"""`/corral/v1/machine` for clients, and `/corral/v1/machines` for admins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.dashboard_client import signed_in
from support.proxy_harness import ProxyHarness

from proxy.nodes.gather import NodeAnswer

KEYS = """
[keys.one]
key = "corral-one-12345"
models = ["other"]
[keys.root]
key = "corral-admin-123"
admin = true
"""


async def get(proxy: ProxyHarness, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with proxy.http.get(f"/corral/v1/{path}", headers=headers) as response:
        return response.status, await response.json()


async def test_a_machine_tells_its_models_memory_and_requests(proxy: ProxyHarness) -> None:
    await proxy.fake()
    status, found = await get(proxy, "machine")
    assert status == 200
    assert (found["state"], found["version"], found["requests"]) == ("serving", "1.2.3", [])
    assert found["memory"]["host"]["total"] == 100
    assert found["devices"] == [{"id": "GPU-0", "name": "a card", "load": 0.43}]
    model = {"state": "loaded", "cause": None, "slots": 2, "slots_busy": 0, "queued": 0}
    assert found["models"] == [{"name": "chat", **model}]
    assert await get(proxy, "machine/caches") == (200, {"models": []})


async def test_a_key_sees_its_own_and_an_admins_key_all(
    proxy: ProxyHarness, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS, "utf-8")
    await proxy.server.close()
    await proxy.open(api_keys_file=path)
    await proxy.fake()
    one, root = "corral-one-12345", "corral-admin-123"
    assert (await get(proxy, "machine"))[0] == 401
    assert (await get(proxy, "machine", one))[1]["models"] == []
    assert [model["name"] for model in (await get(proxy, "machine", root))[1]["models"]] == ["chat"]
    assert [(await get(proxy, "machine/caches", key))[0] for key in (one, root)] == [403, 200]
    assert [(await get(proxy, "machines", key))[0] for key in (one, root)] == [403, 200]


async def test_the_page_gets_all_machines_and_what_is_missing(proxy: ProxyHarness) -> None:
    assert (await get(proxy, "machines"))[0] == 401
    answer = {"version": "9", "models": [], "memory": {}, "requests": [], "up_s": 1}
    proxy.dashboard.answers = [
        NodeAnswer("b", answer),
        NodeAnswer("c", problem="no answer in 2 s"),
    ]
    await signed_in(proxy)
    own, there, gone = (await get(proxy, "machines"))[1]["machines"]
    assert (own["name"], own["machine"]["version"]) == ("(this machine)", "1.2.3")
    assert (there["name"], there["machine"], there["problem"]) == ("b", answer, None)
    assert (gone["name"], gone["machine"], gone["problem"]) == ("c", None, "no answer in 2 s")
