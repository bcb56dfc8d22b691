from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.hub import COMMIT, CONTENT, FILE, REPO, FakeHub

from supervisor.hub.cache import HubCache
from supervisor.hub.client import HubClient
from supervisor.hub.repository import RemoteFile, Repository
from supervisor.hub.transfer import Transfer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeHub({REPO: {FILE: CONTENT, "README.md": b"#"}}).running() as one:
        yield one


@pytest.fixture
def waits() -> list[float]:
    """What the client waited between attempts; it does not really."""
    return []


@pytest.fixture
def client(hub: FakeHub, waits: list[float]) -> HubClient:
    return HubClient(hub.url, sleep=waits.append)


@pytest.fixture
def cache(tmp_path: Path) -> HubCache:
    return HubCache(tmp_path / "hub")


@pytest.fixture
def repository(hub: FakeHub) -> Repository:
    file = RemoteFile(FILE, len(CONTENT), hub.digest(FILE, CONTENT))
    return Repository(REPO, "main", COMMIT, {FILE: file})


@pytest.fixture
def transfer(repository: Repository, cache: HubCache, client: HubClient) -> Callable[[], Transfer]:
    def make() -> Transfer:
        file = repository.files[FILE]
        return Transfer(
            name=FILE,
            url=client.file_url(repository, FILE),
            size_bytes=file.size_bytes,
            digest=file.digest,
            part=cache.part(REPO, file.digest),
            target=cache.blob(REPO, file.digest),
            lock=cache.lock(REPO, file.digest),
        )

    return make
