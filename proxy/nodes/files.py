"""Files of a shared directory that name nodes, and the file of this one. Imported only if needed.

A daemon writes a file with its address, renews it every 10 s, and removes it when it stops. A file
that was not renewed for a minute belongs to a dead daemon. The directory is read every few seconds:
a network file system reports no changes of other machines.

Source: Prometheus, `file_sd_config`, whose format this is: `[{"targets": ["HOST:PORT"]}]`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from proxy.nodes.configured import ADDRESSES_MAX, Answer, NodeAddress
from proxy.nodes.settings import NodeUrl
from proxy.observe.record import Emit

_HEARTBEAT_S: Final = 10.0
_LIFETIME_S: Final = 60.0
_REMOVE_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 64 * 1024


def _now_s() -> float:
    """Return the time to compare with those of files."""
    return datetime.now(UTC).timestamp()


class _Group(BaseModel):
    targets: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=ADDRESSES_MAX)]


_GROUPS: Final = TypeAdapter(list[_Group])


async def resolve(url: NodeUrl) -> Answer:
    return await asyncio.to_thread(read_directory, Path(url.host), _now_s())


def read_directory(pattern: Path, now_s: float) -> Answer:
    """Return the addresses in all files of a pattern that were renewed in the last minute."""
    directory, question = pattern.parent, str(pattern)
    addresses: list[NodeAddress] = []
    failures: dict[str, str] = {}
    dead = 0
    try:
        paths = sorted(path for path in directory.iterdir() if fnmatch(path.name, pattern.name))
    except OSError as error:
        return Answer(failures={question: f"{directory} cannot be read: {error.strerror}"})
    for path in paths[:ADDRESSES_MAX]:
        try:
            with path.open("rb") as file:  # opened before `fstat`, or NFS reports an old time
                is_dead = os.fstat(file.fileno()).st_mtime < now_s - _LIFETIME_S
                text = b"" if is_dead else file.read(_MAX_BYTES + 1)
            dead += is_dead
            addresses += [] if is_dead else read_targets(text, (str(path), question))
        except FileNotFoundError:
            continue  # its daemon has stopped
        except (OSError, ValueError) as error:
            failures[str(path)] = f"{path} cannot be read: {error}"
    empty = f"none of {dead} files in {directory} was renewed in the last minute"
    return Answer(addresses, failures=failures, empty=empty if dead else f"no file is {pattern}")


def read_targets(text: bytes, questions: tuple[str, ...] = ()) -> list[NodeAddress]:
    """Parse a file. Raises ValueError."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES // 1024} KiB")
    try:
        groups = _GROUPS.validate_json(text)
    except ValidationError as error:
        raise ValueError('not [{"targets": ["HOST:PORT"]}]') from error
    return [
        _address(target, questions) for group in groups for target in dict.fromkeys(group.targets)
    ]


def _address(target: str, questions: tuple[str, ...]) -> NodeAddress:
    parts = urlsplit(f"//{target}")
    if parts.netloc != target or "@" in target or not (parts.hostname and parts.port):
        raise ValueError(f"{target!r} is not HOST:PORT")
    host = parts.hostname
    return NodeAddress(host, parts.port, host, questions, has_own_port=True)


class OwnFile:
    """The file of this process; `remove` also undoes a `write` that still runs in a thread."""

    def __init__(self, directory: Path, target: str, process: str) -> None:
        self._host = socket.gethostname()
        self._text = json.dumps([{"targets": [target]}])
        self._is_over = False
        self.path = directory / f"{self._host}-{process[:8]}.json"

    def write(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(self._text, "utf-8")
        draft.replace(self.path)
        if self._is_over:
            self.remove()

    def remove(self) -> None:
        self._is_over = True
        self.path.unlink(missing_ok=True)

    def remove_dead(self) -> None:
        """Remove the files of killed daemons of this machine."""
        others = set(self.path.parent.glob(f"{self._host}-*.json")) - {self.path}
        for path in others:
            with suppress(FileNotFoundError):  # its daemon, or another one, has removed it
                if path.stat().st_mtime < _now_s() - _LIFETIME_S:
                    path.unlink()


async def announce(directory: Path, target: str, process: str, emit: Emit) -> None:
    """Keep the file of this process in a directory until cancelled."""
    file = OwnFile(directory, target, process)
    reason: str | None = None
    try:
        while True:
            before, reason = reason, None
            try:
                await asyncio.to_thread(file.write)
                await asyncio.to_thread(file.remove_dead)
            except OSError as error:
                reason = f"{error.filename or directory}: {error.strerror}"
            if reason and reason != before:
                emit("node.not_announced", reason=reason)
            await asyncio.sleep(_HEARTBEAT_S)
    finally:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await asyncio.to_thread(file.remove)


def target_of(host: str, port: int) -> str:
    """Return HOST:PORT of a listener; one of all interfaces is reached by this machine's name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{host}:{port}"
    if address.is_unspecified:
        return f"{socket.gethostname()}:{port}"
    return f"[{host}]:{port}" if address.version == 6 else f"{host}:{port}"
