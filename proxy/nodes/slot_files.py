"""Copies slot files from nodes, and offers them ours.

A node is known by its process, which another machine may name; its address, key and certificates
are those of our settings, so no other machine can redirect a copy. An interrupted copy is
continued once, and counts only if its SHA-256 is right.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import orjson
from attrs import define, field
from multidict import CIMultiDict

from proxy.auth.access import SLOT_FILES
from proxy.common.headers import HOP
from proxy.errors import UpstreamFailed
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.monitor import NodeMonitors
from proxy.upstream.client import UpstreamRequest, UpstreamResponse, get_request
from proxy.upstream.upstream import average

_FIND_S: Final = 2.0
_MANIFESTS_MAX_BYTES: Final = 512 * 1024
# Before the first copy from a node: 1 Gbit/s, and a few round trips.
_BYTE_S: Final = 8e-9
_FIXED_S: Final = 0.01
_WRITE_BYTES: Final = 1024**2
_ATTEMPTS: Final = 2


@define(eq=False, slots=False)
class NodeSlotFiles:
    """The slot files of all nodes. Coroutines raise UpstreamFailed and UpstreamTimeout."""

    _nodes: NodeMonitors
    _byte_s: dict[str, float] = field(factory=dict, init=False)  # by the name of the node

    @property
    def has_peers(self) -> bool:
        return any(monitor.process and monitor.admitted for monitor in self._nodes)

    def knows(self, process: str) -> bool:
        return self._nodes.node_of(process) is not None

    def peers(self, model: str) -> list[ConfiguredNode]:
        """Return the nodes that serve a model and may take files of it."""
        return self._nodes.peers(model)

    def transfer_s(self, process: str, size_bytes: int) -> float:
        """Return how long it takes to copy a file, by the latest copies from that node."""
        node = self._nodes.node_of(process)
        return _FIXED_S + size_bytes * self._byte_s.get(node.name if node else "", _BYTE_S)

    async def find(self, process: str, cache_key: str, turn_hashes: Sequence[int]) -> str | None:
        """Return the manifest of the file that has most of a conversation, if there is one."""
        turns = ",".join(f"{turn:x}" for turn in turn_hashes)
        query = urlencode({"cache_key": cache_key, "turns": turns})
        request = get_request(SLOT_FILES, query, **{HOP: "1"})
        node = self._node(process)
        answer = await node.fetch(request, self._nodes.settings, _FIND_S, _MANIFESTS_MAX_BYTES)
        return answer.body.decode("utf-8", "replace") if answer.status == 200 else None

    async def copy(self, process: str, name: str, size_bytes: int, target: Path) -> None:
        """Fill an empty file with the content of a node's file. Raises OSError too."""
        node, began_at_s = self._node(process), time.monotonic()
        copy = _Copy(target, size_bytes)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._receive(node, name, copy)
                break
            except UpstreamFailed:
                if attempt == _ATTEMPTS or not copy.received_bytes:
                    raise
        copy.check(node.name)
        byte_s = max(0.0, time.monotonic() - began_at_s - _FIXED_S) / max(1, size_bytes)
        self._byte_s[node.name] = average(self._byte_s.get(node.name, byte_s), byte_s)

    async def _receive(self, node: ConfiguredNode, name: str, copy: _Copy) -> None:
        begins_at = copy.received_bytes
        fields = {"Range": f"bytes={begins_at}-", "If-Range": copy.etag} if begins_at else {}
        request = get_request(f"{SLOT_FILES}/{name}", **{HOP: "1"}, **fields)
        upstream = node.upstream("", "", 1)
        async with UpstreamResponse(upstream, request, self._nodes.settings) as response:
            if response.status != (206 if begins_at else 200):
                raise UpstreamFailed(f"{node.name} answers {response.status} to a slot file")
            copy.etag = response.headers.get("ETag", "")
            copy.digest = response.headers.get("Repr-Digest", "")
            while chunk := await response.read():
                await copy.add(chunk)
            await copy.flush()

    async def offer(
        self, node: ConfiguredNode, manifests: Iterable[str], limit_s: float
    ) -> list[str]:
        """Have a node copy files of ours; return the names of those that it took."""
        body = orjson.dumps({"process": self._nodes.process, "manifests": list(manifests)})
        headers = CIMultiDict({HOP: "1", "Content-Type": "application/json"})
        request = UpstreamRequest("POST", SLOT_FILES, "", headers, body)
        settings = self._nodes.settings
        answer = await node.fetch(request, settings, limit_s, _MANIFESTS_MAX_BYTES)
        if answer.status != 200:
            raise UpstreamFailed(f"{node.name} answers {answer.status} to an offer of slot files")
        try:
            taken = orjson.loads(answer.body)["taken"]
            return [str(name) for name in taken]
        except (ValueError, TypeError, KeyError) as error:
            raise UpstreamFailed(f"{node.name} does not answer like a llama-corral") from error

    def _node(self, process: str) -> ConfiguredNode:
        if node := self._nodes.node_of(process):
            return node
        raise UpstreamFailed("the process is that of no node; is it missing in the settings?")


class _Copy:
    """A file that arrives; its SHA-256 is computed as it is written, in threads."""

    def __init__(self, target: Path, size_bytes: int) -> None:
        self.received_bytes = 0
        self.etag = self.digest = ""
        self._target = target
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._pieces: list[bytes] = []
        self._sha256 = hashlib.sha256()

    async def add(self, chunk: bytes) -> None:
        if self.received_bytes + len(chunk) > self._size_bytes:
            raise UpstreamFailed("a slot file is longer than its manifest says")
        self._pieces.append(chunk)
        self.received_bytes += len(chunk)
        if self.received_bytes - self._written_bytes >= _WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        data, self._pieces = b"".join(self._pieces), []
        self._written_bytes, begins_at = self.received_bytes, self._written_bytes
        await asyncio.to_thread(self._write, data, begins_at)

    def _write(self, data: bytes, begins_at: int) -> None:
        # A thread goes on after its caller was cancelled: then the file is gone, and stays so.
        with self._target.open("r+b") as file:
            file.seek(begins_at)
            file.write(data)
        self._sha256.update(data)

    def check(self, node: str) -> None:
        """Check the content by its Repr-Digest. Source: RFC 9530, section 3."""
        digest = f"sha-256=:{b64encode(self._sha256.digest()).decode()}:"
        if self.received_bytes != self._size_bytes or self.digest != digest:
            raise UpstreamFailed(f"{node} sent another slot file than its digest says")
