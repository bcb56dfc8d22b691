import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from supervisor.errors import DownloadFailed
from supervisor.system import download as download_module
from supervisor.system.download import download_wheel

CONTENT = bytes(range(256)) * 4096
NAME = "tiny_model-1.2-py3-none-any.whl"
SIZE_MAX = 2 * len(CONTENT)


class Index(ThreadingHTTPServer):
    """A package index with one wheel; `cut_at` breaks the first response there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cut_at: int | None = None
        self.has_ranges = True
        self.content_type = "application/vnd.pypi.simple.v1+json"
        self.sha256 = hashlib.sha256(CONTENT).hexdigest()
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple/"

    @property
    def page(self) -> bytes:
        file = {"filename": NAME, "url": f"../../files/{NAME}", "size": len(CONTENT)}
        other = {**file, "filename": NAME.replace("1.2", "1.1"), "hashes": {"sha256": "0" * 64}}
        found = {"files": [other, {**file, "hashes": {"sha256": self.sha256}}]}
        return json.dumps(found).encode() if "json" in self.content_type else b"<a>a</a>"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            self._send(200, self.server.page, len(self.server.page))
            return
        wanted = self.headers["Range"] if self.server.has_ranges else None
        self.server.ranges.append(self.headers["Range"])
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        body, self.server.cut_at = CONTENT[start : self.server.cut_at], None
        self._send(206 if wanted else 200, body, len(CONTENT) - start)

    def _send(self, status: int, body: bytes, length: int) -> None:
        whole = len(CONTENT)
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status == 206:
            self.send_header("Content-Range", f"bytes {whole - length}-{whole - 1}/{whole}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def configure_pip(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    run = subprocess.run

    def answer(argv: list[str], **options: Any) -> Any:
        if argv[-2:] == ["config", "list"]:
            return subprocess.CompletedProcess(argv, 0, settings)
        return run(argv, **options)

    monkeypatch.setattr(subprocess, "run", answer)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as index:
        configure_pip(monkeypatch, f"global.index-url='{index.url}'\n")
        thread = threading.Thread(target=index.serve_forever, args=[0.01])
        thread.start()
        yield index
        index.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    client = functools.partial(download_module.HttpClient, sleep=lambda _: None)
    monkeypatch.setattr(download_module, "HttpClient", client)


def fetch(directory: Path, size_max_bytes: int = SIZE_MAX) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = []
    download_wheel(
        "Tiny.Model==1.2",
        directory,
        size_max_bytes,
        lambda done, whole: steps.append((done, whole)),
    )
    return steps


def test_a_wheel_is_downloaded_with_progress(index: Index, tmp_path: Path) -> None:
    steps = fetch(tmp_path)
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_broken_download_is_resumed(index: Index, tmp_path: Path, *, has_ranges: bool) -> None:
    index.cut_at, index.has_ranges = 700_000, has_ranges
    fetch(tmp_path)
    last = len(CONTENT) - 1
    assert index.ranges == [f"bytes=0-{last}", f"bytes=700000-{last}"]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_wheel_that_is_not_the_file_of_the_index_is_removed(index: Index, tmp_path: Path) -> None:
    index.sha256 = "1" * 64
    with pytest.raises(DownloadFailed, match="SHA-256"):
        fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_is_too_large_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="more than it may"):
        fetch(tmp_path, len(CONTENT) - 1)
    assert index.ranges == []


@pytest.mark.parametrize("content_type", ["text/html", "application/vnd.pypi.simple.v1+json"])
def test_pip_downloads_files_that_the_index_does_not_list(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_type: str
) -> None:
    index.content_type = content_type
    wanted: list[str] = []
    monkeypatch.setattr(download_module, "pip_download", lambda name, _: wanted.append(name))
    download_wheel("tiny-model==9", tmp_path, SIZE_MAX, lambda *_: None)
    assert wanted == ["tiny-model==9"]


def test_settings_of_pips_environment_win(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "global.index-url='http://127.0.0.1:9/simple'\n"
    configure_pip(monkeypatch, f":env:.index-url='{index.url}'\n{other}")
    fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_pip_itself_names_its_settings(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    fetch(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_pip_that_does_not_answer_downloads_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(argv: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    wanted: list[str] = []
    monkeypatch.setattr(download_module, "pip_download", lambda name, _: wanted.append(name))
    download_wheel("tiny-model==9", tmp_path, SIZE_MAX, lambda *_: None)
    assert wanted == ["tiny-model==9"]


def test_without_a_setting_the_index_is_that_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(404)

    reach = functools.partial(httpx.Client, transport=httpx.MockTransport(refuse))
    monkeypatch.setattr(httpx, "Client", reach)
    monkeypatch.setattr(download_module, "pip_download", lambda *_: None)
    configure_pip(monkeypatch, "")
    download_wheel("tiny-model==9", tmp_path, SIZE_MAX, lambda *_: None)
    help_text = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "1000"},
    ).stdout
    (url,) = asked
    assert f"(default {url.removesuffix('/tiny-model/')})" in help_text
