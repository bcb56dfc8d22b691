"""Nodes that files of a shared directory name, and the file of this daemon."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.node import FakeNode, NodesProxy, configured_node
from support.proxy_harness import until

from proxy.nodes import files
from proxy.nodes.files import OwnFile, announce, read_directory, read_targets, target_of
from proxy.settings import ProxySettings

NOW_S = 1e9
LOADED = {"id": "chat", "status": {"value": "loaded"}, "meta": {"slots": 2}}


def write(path: Path, *targets: str, age_s: float | None = None) -> None:
    """Write a file now, or with an age at `NOW_S`."""
    path.write_text(json.dumps([{"targets": targets, "labels": {"job": "corral"}}]), "utf-8")
    if age_s is not None:
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))


def states(front: NodesProxy) -> dict[str, str]:
    return {stat.name: stat.state for stat in front.nodes.stats()}


def never(name: str, /, **fields: object) -> None:
    raise AssertionError(name, fields)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ('[{"targets": ["node1:8080", "10.0.0.7:1"]}]', ["node1:8080", "10.0.0.7:1"]),
        ('[{"targets": ["[fd00::1]:80"], "labels": {"a": "b"}}]', ["[fd00::1]:80"]),
        ('[{"targets": ["a:1", "a:1"]}, {"targets": ["b:2"]}]', ["a:1", "b:2"]),
        ("[]", []),
    ],
)
def test_a_file_has_the_format_of_prometheus(text: str, targets: list[str]) -> None:
    assert [str(address) for address in read_targets(text.encode())] == targets


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not \\[{"),
        ('{"targets": []}', "not \\[{"),
        ('[{"targets": ["node1"]}]', "'node1' is not HOST:PORT"),
        ('[{"targets": ["http://a:1"]}]', "is not HOST:PORT"),
        ('[{"targets": ["key@a:1"]}]', "is not HOST:PORT"),
        ('[{"targets": ["a:99999"]}]', "out of range"),
        (" " * 70_000, "larger than 64 KiB"),
    ],
)
def test_another_file_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_targets(text.encode())


def test_a_directory_is_read_without_drafts_and_dead_files(tmp_path: Path) -> None:
    pattern = tmp_path / "*.json"
    assert read_directory(pattern, NOW_S).empty == f"no file is {pattern}"
    write(tmp_path / "dead.json", "a:1", age_s=61)
    assert read_directory(pattern, NOW_S).empty.startswith("none of 1 files in")
    write(tmp_path / "late.json", "b:1", age_s=59)
    write(tmp_path / "other.draft", "c:1", age_s=0)
    (tmp_path / "half.json").write_text('[{"tar', "utf-8")
    answer = read_directory(pattern, NOW_S)
    assert [str(address) for address in answer.addresses] == ["b:1"]
    assert list(answer.failures) == [str(tmp_path / "half.json")]
    gone = read_directory(tmp_path / "no" / "*.json", NOW_S)
    assert list(gone.failures.values()) == [
        f"{tmp_path}/no cannot be read: No such file or directory"
    ]


def test_an_unreadable_directory_or_file_keeps_its_addresses(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "a:1")
    pattern = tmp_path / "*.json"
    (address,) = read_directory(pattern, NOW_S).addresses
    assert set(address.questions) == {str(pattern), str(tmp_path / "a.json")}


def test_a_listener_of_all_interfaces_is_reached_by_the_name_of_its_machine() -> None:
    name = socket.gethostname()
    everywhere = ("0.0.0.0", "::")  # noqa: S104 (what users listen on)
    assert [target_of(host, 8) for host in everywhere] == [f"{name}:8"] * 2
    assert target_of("fd00::1", 8) == "[fd00::1]:8"
    assert target_of("node1.lan", 8) == "node1.lan:8"


async def test_a_file_is_there_as_long_as_its_daemon_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HEARTBEAT_S", 0.01)
    directory = tmp_path / "new" / "nodes"
    own = OwnFile(directory, "node1:8080", "0123456789")
    killed = own.path.with_name(f"{socket.gethostname()}-dead.json")
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(announce(directory, "node1:8080", "0123456789", never))
        await until(own.path.exists)
        write(killed, "node1:8081", age_s=61)
        await until(lambda: not killed.exists())
        os.utime(own.path, (0, 0))
        await until(lambda: own.path.stat().st_mtime > 0)
        assert [str(found) for found in read_targets(own.path.read_bytes())] == ["node1:8080"]
        task.cancel()
    assert list(directory.iterdir()) == []


def test_a_write_that_ends_after_the_removal_leaves_no_file(tmp_path: Path) -> None:
    own = OwnFile(tmp_path, "node1:8080", "0123456789")
    own.remove()
    own.write()
    assert not own.path.exists()


async def test_a_directory_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HEARTBEAT_S", 0.01)
    (tmp_path / "file").touch()
    heard: list[Any] = []
    written = 0

    def emit(name: str, /, **fields: object) -> None:
        heard.append((name, fields["reason"]))

    write_file = OwnFile.write

    def count(file: OwnFile) -> None:
        nonlocal written
        written += 1
        write_file(file)

    monkeypatch.setattr(OwnFile, "write", count)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(announce(tmp_path / "file", "a:1", "p", emit))
        await until(lambda: written > 2)
        task.cancel()
    assert heard == [("node.not_announced", f"{tmp_path / 'file'}: File exists")]


async def test_nodes_come_and_go_with_their_files(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        node = FakeNode(LOADED)
        await node.start()
        front = NodesProxy(configured_node("job", f"file+http://{tmp_path}/*.json"))
        async with front.running():
            write(tmp_path / "a.json", f"127.0.0.1:{node.port}")
            name = f"job@127.0.0.1:{node.port}"
            await until(lambda: states(front) == {"job": "resolved", name: "up"})
            assert (await front.ask())[:2] == (200, f"{name}/chat")
            os.utime(tmp_path / "a.json", (0, 0))
            await until(lambda: states(front) == {"job": "unresolved"})
            (stat,) = front.nodes.stats()
            assert str(stat.problem).startswith("none of 1 files")
        await node.stop()


async def test_a_server_announces_its_port_until_it_drains(tmp_path: Path) -> None:
    front = NodesProxy(settings=ProxySettings(listen="127.0.0.1:0", announce_in=tmp_path))
    async with asyncio.timeout(PATIENCE_S), front.running(), asyncio.TaskGroup() as group:
        serving = group.create_task(front.server.serve())
        pattern = tmp_path / "*.json"
        await until(lambda: bool(read_directory(pattern, 0).addresses))
        (address,) = read_directory(pattern, 0).addresses
        assert str(address) == f"127.0.0.1:{front.server.port}"
        serving.cancel()
        await asyncio.wait([serving])
        assert list(tmp_path.iterdir()) == []
