from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import tiny_clip, tiny_gguf, tiny_lora
from support.hub import COMMIT, CONTENT, FILE, REPO, FakeHub

from supervisor.models.hub import HubClient
from supervisor.models.local_stores import HubCache
from supervisor.models.repository import RemoteFile, Repository
from supervisor.models.transfer import Transfer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with FakeHub({REPO: {FILE: CONTENT, "README.md": b"#"}}).running() as one:
        yield one


@pytest.fixture
def waits() -> list[float]:
    """The waits between attempts; the client does not really wait."""
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


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small GGUF files, made once."""
    directory = tmp_path_factory.mktemp("files")
    return {
        "model": tiny_gguf.make(directory / "model.gguf"),
        "clip": tiny_clip.make(directory / "clip.gguf"),
        "wide_clip": tiny_clip.make(directory / "wide.gguf", embd=32),
        "lora": tiny_lora.make(directory / "lora.gguf"),
    }
