from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.release_server import ReleaseServer

from supervisor.errors import DownloadFailed
from supervisor.system.download import Attempts, HttpClient, Interruption, RemoteFile, download

CONTENT = bytes(range(256)) * 4096
NAME = "llama-b1-bin-ubuntu-x64.tar.gz"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[ReleaseServer]:
    with ReleaseServer().serving() as server:
        server.releases["b1"] = {NAME: CONTENT}
        yield server


def remote(server: ReleaseServer) -> RemoteFile:
    url = f"{server.url}/releases/download/b1/{NAME}"
    return RemoteFile(NAME, url, len(CONTENT), SHA256)


def fetch(file: RemoteFile, directory: Path) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = []
    with httpx.Client(follow_redirects=True) as client:
        show = lambda done, whole: steps.append((done, whole))  # noqa: E731
        path = download(HttpClient(client, lambda _: None), file, directory, show, "the release")
    assert path.read_bytes() == CONTENT
    assert [path.name for path in directory.iterdir()] == [NAME]
    return steps


def test_a_file_behind_a_redirect_is_downloaded(server: ReleaseServer, tmp_path: Path) -> None:
    assert fetch(remote(server), tmp_path)[-1] == (len(CONTENT), len(CONTENT))


def test_a_connection_that_breaks_is_made_again(server: ReleaseServer, tmp_path: Path) -> None:
    server.faults.cuts = [200_000, 300_000, 600_000, 700_000]
    fetch(remote(server), tmp_path)
    starts = (0, 200_000, 300_000, 600_000, 700_000)
    assert server.ranges == [f"bytes={start}-{len(CONTENT) - 1}" for start in starts]


def test_a_server_without_ranges_begins_again(server: ReleaseServer, tmp_path: Path) -> None:
    server.faults.cuts, server.faults.has_ranges = [700_000], False
    fetch(remote(server), tmp_path)


def test_what_breaks_without_progress_is_given_up_and_continued(
    server: ReleaseServer, tmp_path: Path
) -> None:
    server.faults.cuts = [700_000] * 5
    with pytest.raises(DownloadFailed, match="broke") as caught:
        fetch(remote(server), tmp_path)
    assert "continues" in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.part"]
    server.faults.cuts = []
    fetch(remote(server), tmp_path)
    assert server.ranges[-1] == f"bytes=700000-{len(CONTENT) - 1}"


def test_what_breaks_again_and_again_is_given_up() -> None:
    waits: list[float] = []

    def break_after_progress(attempts: Attempts) -> None:
        attempts.note_progress()
        raise Interruption("the connection ended early")

    with httpx.Client() as client, pytest.raises(DownloadFailed, match="ended early"):
        HttpClient(client, waits.append).retry(break_after_progress, "it broke")
    assert waits == 999 * [1.0]


def test_another_file_is_removed(server: ReleaseServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="SHA-256 is not that of the release"):
        fetch(replace(remote(server), digest="0" * 64), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_file_of_another_size_is_no_file(
    server: ReleaseServer, tmp_path: Path, wrong: int
) -> None:
    with pytest.raises(DownloadFailed):
        fetch(replace(remote(server), size_bytes=len(CONTENT) + wrong), tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_file_that_is_not_there_is_told_with_the_status(
    server: ReleaseServer, tmp_path: Path
) -> None:
    missing = replace(remote(server), url=f"{server.url}/releases/download/b2/{NAME}")
    with pytest.raises(DownloadFailed, match="answers 404 Not Found"):
        fetch(missing, tmp_path)
