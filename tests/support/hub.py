"""A Hugging Face hub with its CDN on another port, and faults to order.

Source: the hub's API as huggingface_hub 2.4 reads it: /api/models (search, siblings with `blobs`),
/OWNER/NAME/resolve/COMMIT/PATH, which redirects to the CDN with X-Repo-Commit and X-Linked-Etag.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE_BYTES = 16 * 1024

# A repository for tests, with a file in which a shifted or doubled piece shows in the digest.
REPO, FILE = "org/model-GGUF", "model-Q8_0.gguf"
CONTENT = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(16 * 1024))


@dataclass
class Refusal:
    """An answer that replaces the one to a request."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeHub:
    """The files of the hub, and its requests.

    Attributes:
        repositories: The files of each repository, by path.
        token: The token of private repositories.
        private: Repositories that are shown with the token only.
        api_refusals: Answers to the next requests of the API, in order; None: as it should be.
        refusals: Answers to the next requests of files, likewise.
        cdn_refusals: Answers of the CDN to the next requests.
        cuts: After how many bytes each of the next transfers is cut.
        damaged: Paths whose content is not that of their digest.
        in_git: Paths that are in git itself, not in LFS.
        ignores_ranges: Whether the CDN sends whole files.
        served_bytes: Bytes sent, by path.
        seen: Each request, as METHOD PATH, with the authorization that came with it.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str = ""
    private: set[str] = field(default_factory=set)
    api_refusals: list[Refusal | None] = field(default_factory=list)
    refusals: list[Refusal | None] = field(default_factory=list)
    cdn_refusals: list[Refusal | None] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    in_git: set[str] = field(default_factory=set)
    ignores_ranges: bool = False
    served_bytes: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[str, str]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn_url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()

    @contextmanager
    def running(self) -> Iterator[Self]:
        with _server(_hub_handler(self)) as self.url, _server(_cdn_handler(self)) as cdn_url:
            # Another host, not only another port.
            self.cdn_url = cdn_url.replace("127.0.0.1", "localhost")
            yield self

    def requests(self, part: str) -> int:
        return sum(part in line for line, _ in self.seen)

    def may_see(self, repo: str, authorization: str) -> bool:
        return repo not in self.private or authorization == f"Bearer {self.token}"

    def digest(self, path: str, content: bytes) -> str:
        if path in self.in_git:
            blob = b"blob %d\0" % len(content) + content
            return hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        return hashlib.sha256(content).hexdigest()

    def model(self, repo: str) -> dict[str, Any]:
        files = self.repositories[repo]
        return {
            "id": repo,
            "sha": COMMIT,
            "downloads": len(repo),
            "likes": 1,
            "lastModified": "2026-10-01T12:00:00.000Z",
            "gated": False,
            "gguf": {"total": 135_000_000, "architecture": "llama", "context_length": 2048},
            "siblings": [self._sibling(path, content) for path, content in files.items()],
        }

    def _sibling(self, path: str, content: bytes) -> dict[str, Any]:
        digest = self.digest(path, content)
        found = {"rfilename": path, "size": len(content), "blobId": digest[:40]}
        if path in self.in_git:
            return found
        return found | {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that has read enough resets the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.seen.append((f"{self.command} {self.path}", self.headers["authorization"] or ""))
        try:
            self.answer(urlsplit(self.path).path)
        except (BrokenPipeError, ConnectionResetError):  # the client has read enough
            self.close_connection = True

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def reply(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refused(self, refusals: list[Refusal | None]) -> bool:
        refusal = refusals.pop(0) if refusals else None
        if refusal is None:
            return False
        self.reply(refusal.status, refusal.headers)
        return True

    def missing(self, code: str) -> None:
        self.reply(404, {"x-error-code": code})


class _Hub(_Handler):
    def answer(self, path: str) -> None:
        if path == "/api/models":
            self._search()
        elif path.startswith("/api/models/"):
            self._model(path.removeprefix("/api/models/"))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", unquote(path)):
            self._resolve(found[1], found[3])
        else:
            self.missing("RepoNotFound")

    def _search(self) -> None:
        if self.refused(self.hub.api_refusals):
            return
        asked = parse_qs(urlsplit(self.path).query)
        words = asked["search"][0].lower().split()
        names = [repo for repo in self.hub.repositories if all(w in repo.lower() for w in words)]
        found = [self.hub.model(repo) for repo in names][: int(asked["limit"][0])]
        for entry in found:
            del entry["siblings"]
        self._json(found)

    def _model(self, path: str) -> None:
        repo = path.partition("/revision/")[0]
        if self.refused(self.hub.api_refusals):
            return
        if repo not in self.hub.repositories or not self._is_shown(repo):
            # Source: huggingface.co, which does not tell strangers that a repository exists.
            status = 404 if self.headers["authorization"] else 401
            self.reply(status, {"x-error-code": "RepoNotFound"})
            return
        self._json(self.hub.model(repo))

    def _resolve(self, repo: str, path: str) -> None:
        if self.refused(self.hub.refusals):
            return
        if not self._is_shown(repo) or path not in self.hub.repositories.get(repo, {}):
            self.missing("EntryNotFound")
            return
        content = self.hub.repositories[repo][path]
        digest = self.hub.digest(path, content)
        headers = {"x-repo-commit": COMMIT, "etag": f'"{digest}"', "x-linked-etag": f'"{digest}"'}
        headers["x-linked-size"] = str(len(content))
        self.reply(302, {**headers, "location": f"{self.hub.cdn_url}/{repo}/{path}"})

    def _is_shown(self, repo: str) -> bool:
        return self.hub.may_see(repo, self.headers["authorization"] or "")

    def _json(self, value: object) -> None:
        self.reply(200, {"content-type": "application/json"}, json.dumps(value).encode())


class _Cdn(_Handler):
    def answer(self, path: str) -> None:
        if self.refused(self.hub.cdn_refusals):
            return
        owner, name, file = unquote(path).removeprefix("/").split("/", 2)
        content = self.hub.repositories[f"{owner}/{name}"][file]
        whole = len(content)
        if file in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["range"] or "")
        headers = {"etag": '"1"', "accept-ranges": "bytes"}
        if asked is None or self.hub.ignores_ranges:
            self._send(200, headers, content, file)
            return
        first, last = int(asked[1]), min(int(asked[2] or whole), whole - 1)
        if first >= whole:
            self.reply(416, {"content-range": f"bytes */{whole}"})
            return
        headers["content-range"] = f"bytes {first}-{last}/{whole}"
        self._send(206, headers, content[first : last + 1], file)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes, file: str) -> None:
        is_cut = self.hub.cuts and len(body) > 1
        most = self.hub.cuts.pop(0) if is_cut else len(body)
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, min(most, len(body)), _PIECE_BYTES):
            self.hub.gate.wait()
            piece = body[at : min(at + _PIECE_BYTES, most)]
            self.wfile.write(piece)
            self.hub.served_bytes[file] += len(piece)
        self.close_connection = self.close_connection or most < len(body)


def _hub_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    return type("Hub", (_Hub,), {"hub": hub})


def _cdn_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    return type("Cdn", (_Cdn,), {"hub": hub})


@contextmanager
def _server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
