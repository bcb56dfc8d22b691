"""Copies of slot files from nodes: broken off, altered, or of a process that is no node's."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.node import FakeNode, NodesProxy, configured_node
from support.proxy_harness import until
from support.upstream import Call

from proxy.errors import UpstreamFailed

CONTENT = b"0123456789" * 300_000
DIGEST = f"sha-256=:{b64encode(hashlib.sha256(CONTENT).digest()).decode()}:"
MODEL = {"id": "chat", "status": {"value": "loaded"}, "meta": {"slots": 2}}


class Holder(FakeNode):
    """Sends `content`, the first time only up to `breaks_at`."""

    def __init__(self) -> None:
        super().__init__(MODEL, script=self.send)
        self.process = "holder"
        self.content = CONTENT
        self.breaks_at: int | None = None
        self.asked: list[str] = []

    async def send(self, call: Call) -> None:
        asked = call.headers.get("Range", "")
        self.asked.append(f"{call.line.split()[1]} {asked} {call.headers.get('If-Range', '')}")
        begins_at = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
        status = "206 Partial Content" if asked else "200 OK"
        fields = (f"Content-Length: {len(self.content) - begins_at}", "ETag: e")
        await call.head(*fields, f"Repr-Digest: {DIGEST}", status=status)
        await call.send(self.content[begins_at : self.breaks_at])
        if self.breaks_at:
            self.breaks_at = None
            call.writer.close()


@pytest.fixture
async def holder() -> AsyncIterator[tuple[Holder, NodesProxy]]:
    node = Holder()
    await node.start()
    near = NodesProxy(configured_node("far", node.url))
    async with near.running():
        await until(lambda: near.states() == [True])
        yield node, near
    await node.stop()


async def test_a_copy_that_breaks_off_goes_on_where_it_was(
    holder: tuple[Holder, NodesProxy], tmp_path: Path
) -> None:
    node, near = holder
    node.breaks_at, copy = 2_000_000, tmp_path / "copy"
    copy.touch()
    files = near.nodes.slot_files
    before_s = files.transfer_s("holder", 10**9)
    await files.copy("holder", "name", len(CONTENT), copy)
    assert copy.read_bytes() == CONTENT
    path = "/corral/v1/slot-files/name"
    assert node.asked == [f"{path}  ", f"{path} bytes=2000000- e"]
    assert files.transfer_s("holder", 10**9) != before_s


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:]])
async def test_an_altered_copy_is_an_error(
    holder: tuple[Holder, NodesProxy], tmp_path: Path, content: bytes
) -> None:
    node, near = holder
    node.content, copy = content, tmp_path / "copy"
    copy.touch()
    with pytest.raises(UpstreamFailed):
        await near.nodes.slot_files.copy("holder", "name", len(CONTENT), copy)
    assert copy.stat().st_size <= len(CONTENT)


async def test_only_processes_of_configured_nodes_are_asked(
    holder: tuple[Holder, NodesProxy], tmp_path: Path
) -> None:
    node, near = holder
    files = near.nodes.slot_files
    assert [peer.name for peer in files.peers("chat")] == ["far"]
    assert files.peers("other") == []
    with pytest.raises(UpstreamFailed, match="no node"):
        await files.copy("stranger", "name", 1, tmp_path / "copy")
    near.nodes.set_nodes(())
    with pytest.raises(UpstreamFailed, match="no node"):
        await files.find("holder", "key", (1,))
    assert node.asked == []
