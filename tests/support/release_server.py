"""llama.cpp's releases on GitHub, on the loopback interface, with one fault at a time.

Source: GitHub's REST API, "List releases", "Get the latest release", "Get a release by tag name",
"Rate limits for the REST API"; files are redirected to another host.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LIST = "/repos/ggml-org/llama.cpp/releases"


@dataclass
class Faults:
    """The faults.

    Attributes:
        cuts: After how many bytes each of the next downloads breaks.
        has_ranges: Whether a part of a file may be asked for.
        status: Of all answers of the API.
        headers: Of the same.
        body: Of the same, in place of JSON.
        sha256: Of all files, as the API says it; "" for none.
        lists_size: Whether the API tells the right size.
    """

    cuts: list[int] = field(default_factory=list)
    has_ranges: bool = True
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    sha256: str | None = None
    size_bytes: int | None = None


class ReleaseServer(ThreadingHTTPServer):
    """Releases by tag, each with files by name, the newest first; `stable` maps v0.5.0 to a tag."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.releases: dict[str, dict[str, bytes | Path]] = {}
        self.stable: tuple[str, str] | None = None
        self.drafts: set[str] = set()
        self.faults = Faults()
        self.requests: list[tuple[str, Mapping[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def api(self) -> str:
        return f"{self.url}{LIST}"

    @property
    def ranges(self) -> list[str | None]:
        """The ranges that were asked for, of each download."""
        return [
            headers.get("Range") for path, headers in self.requests if path.startswith("/storage/")
        ]

    def content(self, tag: str, name: str) -> bytes:
        if self.stable and tag == self.stable[0]:
            return f"{self.stable[1]}\n".encode()
        found = self.releases[tag][name]
        return found.read_bytes() if isinstance(found, Path) else found

    def describe(self, tag: str) -> dict[str, Any]:
        is_stable = bool(self.stable and tag == self.stable[0])
        names = ["nightly-tag.txt"] if is_stable else list(self.releases[tag])
        return {
            "tag_name": tag,
            "draft": tag in self.drafts,
            "prerelease": not is_stable,
            "assets": [self._asset(tag, name) for name in names],
        }

    def _asset(self, tag: str, name: str) -> dict[str, Any]:
        content, faults = self.content(tag, name), self.faults
        digest = hashlib.sha256(content).hexdigest() if faults.sha256 is None else faults.sha256
        return {
            "name": name,
            "size": len(content) if faults.size_bytes is None else faults.size_bytes,
            "digest": f"sha256:{digest}" if digest else None,
            "browser_download_url": f"{self.url}/ggml-org/llama.cpp/releases/download/{tag}/{name}",
        }

    def answer(self, path: str) -> object:
        """Return the answer of the API; KeyError for 404."""
        path = path.removeprefix(LIST).partition("?")[0]
        if not path:
            stable = [self.stable[0]] if self.stable else []
            return [self.describe(tag) for tag in [*stable, *self.releases]]
        if path == "/latest":
            return self.describe(self.stable[0] if self.stable else next(iter(self.releases)))
        return self.describe(path.removeprefix("/tags/"))

    @contextmanager
    def serving(self) -> Iterator[ReleaseServer]:
        thread = threading.Thread(target=self.serve_forever, args=[0.01])
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ReleaseServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        if self.path.startswith(LIST):
            self._answer()
        elif "/download/" in self.path:
            tail = self.path.partition("/download/")[2]
            self._send(302, b"", {"Location": f"{self.server.url}/storage/{tail}"})
        else:
            self._file(*self.path.split("/")[-2:])

    def _answer(self) -> None:
        faults = self.server.faults
        if faults.status != 200:
            self._send(faults.status, b'{"message": "no"}', faults.headers)
            return
        try:
            found = self.server.answer(self.path)
        except KeyError:
            self._send(404, b'{"message": "Not Found"}')
            return
        self._send(200, json.dumps(found).encode() if faults.body is None else faults.body)

    def _file(self, tag: str, name: str) -> None:
        faults = self.server.faults
        try:
            content = self.server.content(tag, name)
        except KeyError:
            self._send(404, b"")
            return
        wanted = self.headers["Range"] if faults.has_ranges else None
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        end = faults.cuts.pop(0) if faults.cuts else len(content)
        whole = len(content)
        place = {"Content-Range": f"bytes {start}-{whole - 1}/{whole}"} if wanted else {}
        self._send(206 if wanted else 200, content[start:end], place, whole - start)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def rate_limited(*, for_s: int) -> dict[str, str]:
    """The headers of a refusal for the number of requests."""
    return {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(round(time.time()) + for_s)}  # noqa: TID251 (GitHub's own clock)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def member(name: str, mode: int = 0o644, kind: bytes = tarfile.REGTYPE, to: str = "") -> Any:
    found = tarfile.TarInfo(name)
    found.mode, found.type, found.linkname = mode, kind, to
    return found


def zip_of(*members: tuple[str, int, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, mode, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return packed.getvalue()


def engine_archive(tag: str, program: bytes, **files: bytes) -> bytes:
    """An archive as releases have it: one directory, and a library with links of its versions."""
    top = f"llama-{tag}"
    return tar_of(
        (member(f"{top}/", 0o755, tarfile.DIRTYPE), b""),
        (member(f"{top}/LICENSE"), b"MIT"),
        (member(f"{top}/llama-server", 0o755), program),
        (member(f"{top}/libllama.so.0.1.0", 0o755), b"library"),
        (member(f"{top}/libllama.so.0", kind=tarfile.SYMTYPE, to="libllama.so.0.1.0"), b""),
        (member(f"{top}/libllama.so", kind=tarfile.SYMTYPE, to="libllama.so.0"), b""),
        *((member(f"{top}/{name}"), content) for name, content in files.items()),
    )
