"""Slot files for other machines: who gets them, ranges, and the rate of all copies together."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.proxy_harness import ProxyHarness

from proxy.auth.access import SLOT_FILES
from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.endpoints.slot_files import Pace, StoredSlotFile

KEYS = """
[keys.one]
key = "corral-one-12345"
[keys.root]
key = "corral-admin-123"
admin = true
"""
CONTENT = bytes(range(256)) * 2048
SHA256 = hashlib.sha256(CONTENT)
NAME = "0123456789abcdef"
FILE = SlotFile(NAME, "key", 900, len(CONTENT), ConversationFingerprint((7,), (8,)))


class FakeHost:
    """Has one file (`SlotFileHost`)."""

    send_rate = 1e9

    def __init__(self, directory: Path) -> None:
        self._path = directory / "content"
        self._path.write_bytes(CONTENT)
        self.offers: list[tuple[str, Sequence[str]]] = []

    async def manifest(self, cache_key: str, turn_hashes: Sequence[int], /) -> str | None:
        return '{"name": 1}' if (cache_key, turn_hashes) == ("key", [1, 255]) else None

    async def stored(self, name: str, /) -> StoredSlotFile | None:
        return StoredSlotFile(self._path, len(CONTENT), SHA256.digest()) if name == NAME else None

    async def take_offered(
        self, process: str, manifests: Sequence[str], /
    ) -> Sequence[tuple[str, SlotFile]]:
        self.offers.append((process, manifests))
        return [("chat", FILE)]


@pytest.fixture
async def served(proxy: ProxyHarness, tmp_path: Path) -> ProxyHarness:
    await proxy.server.close()
    proxy.slot_files = FakeHost(tmp_path)
    await proxy.open()
    return proxy


async def get(
    proxy: ProxyHarness, path: str = f"/{NAME}", **headers: str
) -> tuple[int, bytes, Mapping[str, str]]:
    async with proxy.http.get(SLOT_FILES + path, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_a_file_is_sent_with_its_digest_also_while_the_server_drains(
    served: ProxyHarness,
) -> None:
    served.core.server_state.is_draining = True
    status, body, headers = await get(served)
    assert (status, body) == (200, CONTENT)
    assert headers["Repr-Digest"] == f"sha-256=:{b64encode(SHA256.digest()).decode()}:"
    assert headers["ETag"] == f'"{SHA256.hexdigest()}"'
    assert (await served.http.post(SLOT_FILES, json={})).status == 503


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("bytes=100-199", range(100, 200)),
        ("bytes=500000-", range(500_000, len(CONTENT))),
        ("bytes=-10", range(len(CONTENT) - 10, len(CONTENT))),
    ],
)
async def test_a_range_of_a_file(served: ProxyHarness, asked: str, wanted: range) -> None:
    status, body, headers = await get(served, Range=asked)
    assert (status, body) == (206, CONTENT[wanted.start : wanted.stop])
    assert headers["Content-Range"] == f"bytes {wanted.start}-{wanted.stop - 1}/{len(CONTENT)}"


async def test_a_range_counts_only_for_the_same_file_and_within_it(served: ProxyHarness) -> None:
    assert (await get(served, **{"Range": "bytes=5-", "If-Range": '"other"'}))[0] == 200
    for asked in (f"bytes={len(CONTENT)}-", "bytes=9-3", "words=1-2"):
        status, _, headers = await get(served, Range=asked)
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(CONTENT)}")


async def test_no_other_name_is_a_file(served: ProxyHarness) -> None:
    for name in ("fedcba9876543210", "..%2Fcontent", "../content", "content"):
        assert (await get(served, f"/{name}"))[0] == 404


async def test_a_file_is_found_by_the_turns_of_its_conversation(served: ProxyHarness) -> None:
    assert (await get(served, "?cache_key=key&turns=1,ff"))[:2] == (200, b'{"name": 1}')
    assert (await get(served, "?cache_key=other&turns=1,ff"))[0] == 204
    assert (await get(served, "?cache_key=key&turns=x"))[0] == 400


async def test_an_offer_is_answered_with_what_was_taken(served: ProxyHarness) -> None:
    host = served.slot_files
    assert isinstance(host, FakeHost)
    offer = {"process": "p", "manifests": ["one", "two", 3]}
    async with served.http.post(SLOT_FILES, json=offer) as response:
        assert await response.json() == {"taken": [NAME]}
    assert host.offers == [("p", ["one", "two"])]
    async with served.http.post(SLOT_FILES, json={"manifests": "none"}) as response:
        assert response.status == 400


async def test_only_an_admins_key_reads_the_conversations_of_all(
    served: ProxyHarness, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS, "utf-8")
    await served.server.close()
    await served.open(api_keys_file=path)
    for key, expected in (("", 401), ("corral-one-12345", 403), ("corral-admin-123", 200)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert (await get(served, **headers))[0] == expected
        async with served.http.post(
            SLOT_FILES, json={"process": "p", "manifests": []}, headers=headers
        ) as response:
            assert response.status == expected


def test_copies_together_keep_to_the_rate() -> None:
    pace = Pace()
    assert [pace.wait_s(100, 50.0, now_s=0.0) for _ in range(3)] == [0.0, 2.0, 4.0]
    assert pace.wait_s(100, 50.0, now_s=5.5) == 0.5
    assert pace.wait_s(100, 50.0, now_s=100.0) == 0.0
