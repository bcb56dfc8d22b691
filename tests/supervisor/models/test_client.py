from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support import tiny_gguf
from support.hub import COMMIT, CONTENT, FILE, REPO, FakeHub, Refusal

from supervisor.errors import (
    AccessDenied,
    CorralError,
    DownloadFailed,
    HubAccessDenied,
    ModelInvalid,
    NoSuchModel,
)
from supervisor.models import metadata, transfer
from supervisor.models.hub import HubClient
from supervisor.models.local_stores import HubCache
from supervisor.system.download import RemoteFile


def test_a_repository_is_listed_with_digests(client: HubClient, hub: FakeHub) -> None:
    found = client.repository(REPO, "main")
    assert found.commit == COMMIT
    (file,) = found.files.values()
    assert (file.path, file.size_bytes) == (FILE, len(CONTENT))
    assert file.digest == hub.digest(FILE, CONTENT)


def test_telemetry_is_off() -> None:
    assert constants.HF_HUB_DISABLE_TELEMETRY


def test_a_busy_hub_is_asked_again(client: HubClient, hub: FakeHub, waits: list[float]) -> None:
    hub.api_refusals = [Refusal(429, {"retry-after": "3"}), Refusal(502)]
    assert client.repository(REPO, "main").files
    assert waits == [3, 2]


@pytest.mark.parametrize(
    ("refusal", "token", "kind", "words"),
    [
        (Refusal(401, {"x-error-code": "RepoNotFound"}), "", NoSuchModel, "set HF_TOKEN"),
        (Refusal(404, {"x-error-code": "RepoNotFound"}), "t", NoSuchModel, "your token has no"),
        (Refusal(404, {"x-error-code": "RevisionNotFound"}), "", NoSuchModel, ""),
        (Refusal(403, {"x-error-code": "GatedRepo"}), "t", HubAccessDenied, "accept them at"),
        (Refusal(401), "t", HubAccessDenied, "set HF_TOKEN to a valid one"),
        (Refusal(429, {"retry-after": "900"}), "", DownloadFailed, "in 900 s"),
        (Refusal(429, {"ratelimit": '"api";r=0;t=255'}), "", DownloadFailed, "in 255 s"),
        (Refusal(200, {"content-type": "text/html"}), "hf_ü", HubAccessDenied, "set HF_TOKEN"),
    ],
)
def test_refusals_say_what_to_do(  # noqa: PLR0917 (fixtures are parameters)
    client: HubClient,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    token: str,
    kind: type[CorralError],
    words: str,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.api_refusals = [refusal]
    with pytest.raises(kind) as caught:
        client.repository(REPO, "main")
    assert words in (caught.value.hint or "")


def test_a_private_repository_needs_the_token(
    client: HubClient, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private, hub.token = {REPO}, "hf_secret"
    with pytest.raises(NoSuchModel):
        client.repository(REPO, "main")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert client.repository(REPO, "main").files


def test_a_token_that_cannot_be_read_is_named(
    client: HubClient, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))  # a directory
    with pytest.raises(AccessDenied, match="token"):
        client.repository(REPO, "main")
    assert hub.seen == []


def test_a_hub_that_is_not_there_is_named(hub: FakeHub, waits: list[float]) -> None:
    with pytest.raises(DownloadFailed, match=r"127\.0\.0\.1:9"):
        HubClient("http://127.0.0.1:9", sleep=waits.append).repository(REPO, "main")
    assert waits == [1, 2, 4, 8]


def test_a_name_that_does_not_resolve_is_not_tried_again(hub: FakeHub, waits: list[float]) -> None:
    with pytest.raises(DownloadFailed, match=r"the name nowhere\.invalid has no address") as caught:
        HubClient("http://nowhere.invalid", sleep=waits.append).repository(REPO, "main")
    assert "check the network" in (caught.value.hint or "")
    assert waits == []


def test_a_page_that_is_no_answer_is_named(client: HubClient, hub: FakeHub) -> None:
    hub.api_refusals = [Refusal(200, {"content-type": "text/html"})]
    with pytest.raises(DownloadFailed, match="is not an answer of a Hugging Face hub"):
        client.repository(REPO, "main")


def test_offline_nothing_is_requested(
    client: HubClient, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadFailed) as caught:
        client.repository(REPO, "main")
    assert caught.value.hint == "unset HF_HUB_OFFLINE"
    assert hub.seen == []


def test_a_search_is_bounded(client: HubClient, hub: FakeHub) -> None:
    hub.repositories |= {f"org/other-{number}": {} for number in range(9)}
    assert [entry.repo for entry in client.search("MODEL", 5)] == [REPO]
    assert len(client.search("org", 5)) == 5


def test_a_header_is_read_without_its_weights(
    client: HubClient, hub: FakeHub, tmp_path: Path
) -> None:
    path = tiny_gguf.make(tmp_path / FILE)
    with path.open("ab") as file:
        file.truncate(32 * 1024**2)
    hub.repositories[REPO][FILE] = path.read_bytes()
    size_bytes = path.stat().st_size
    url = client.file_url(client.repository(REPO, "main"), FILE)
    found = transfer.read([RemoteFile(FILE, url, size_bytes)], client)
    local = metadata.read(path, cache_dir=tmp_path)
    same = ("architecture", "layers", "size_bytes", "tensor_bytes", "matrix_bytes", "ctx_train")
    assert [getattr(found, entry) for entry in same] == [getattr(local, entry) for entry in same]
    # Bytes in the sockets of both sides come too.
    assert hub.served_bytes[FILE] < size_bytes / 4


def test_a_cut_header_is_read_again(client: HubClient, hub: FakeHub, tmp_path: Path) -> None:
    content = tiny_gguf.make(tmp_path / FILE).read_bytes()
    hub.repositories[REPO][FILE], hub.cuts = content, [1000]
    url = client.file_url(client.repository(REPO, "main"), FILE)
    assert transfer.read([RemoteFile(FILE, url, len(content))], client).layers == 2


def test_what_is_no_gguf_is_refused_before_it_comes(client: HubClient, hub: FakeHub) -> None:
    url = client.file_url(client.repository(REPO, "main"), FILE)
    with pytest.raises(ModelInvalid, match="not a GGUF"):
        transfer.read([RemoteFile(FILE, url, len(CONTENT))], client)


def test_huggingface_hub_finds_published_files(
    client: HubClient, hub: FakeHub, cache: HubCache
) -> None:
    repository = client.repository(REPO, "main")
    file = repository.files[FILE]
    blob = cache.blob(REPO, file.digest)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    path = cache.publish(repository, file)
    found = huggingface_hub.hf_hub_download(
        REPO, FILE, cache_dir=cache.root, endpoint=hub.url, token=False
    )
    assert Path(found) == path
    assert path.read_bytes() == CONTENT
    assert hub.served_bytes[FILE] == 0
    assert cache.is_here(repository, file)
    assert cache.local(REPO, "main") == repository


def test_what_huggingface_hub_fetched_is_here(
    client: HubClient, hub: FakeHub, cache: HubCache
) -> None:
    huggingface_hub.hf_hub_download(REPO, FILE, cache_dir=cache.root, endpoint=hub.url, token=False)
    repository = client.repository(REPO, "main")
    assert cache.is_here(repository, repository.files[FILE])
    assert cache.local("org/nothing", "main") is None
