"""Supports daemons that are the backend of desktop applications: API key, hosts, starter."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import secrets
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from proxy.auth.keys_file import Key
from supervisor.errors import DaemonBusy, DaemonStopping
from supervisor.events import Emit
from supervisor.system.files import write_atomic

# A keys file cannot contain this name.
_NAME: Final = "(desktop)"
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class DesktopKey:
    path: Path
    secret: str = field(repr=False)

    @property
    def key(self) -> Key:
        return Key(_NAME, hashlib.sha256(self.secret.encode()).digest(), admin=True, tools=True)

    @contextmanager
    def write(self) -> Iterator[None]:
        """Keep the secret in its file, mode 0600, for the block."""
        write_atomic(self.path, self.secret, durable=False)
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)


def new_desktop_key(path: Path) -> DesktopKey:
    return DesktopKey(path, f"corral-{secrets.token_hex(_RANDOM_BYTES)}")


# The host that started the daemon, until it joins and gets a number.
STARTER: Final = 0
# The user, after `corral start` at a daemon with hosts; leaves only by a shutdown.
_USER: Final = -1
# A user who quits an application expects its processes to end.
_DRAIN_MAX_S: Final = 5.0


class DesktopHosts:
    """The connected hosts; calls `on_empty` once, when none is left."""

    def __init__(self, emit: Emit, on_empty: Callable[[], None]) -> None:
        self._emit = emit
        self._on_empty = on_empty
        self._hosts = {STARTER}
        self._joined = STARTER
        self._is_lost = False

    @property
    def is_empty(self) -> bool:
        return not self._hosts

    @property
    def drain_max_s(self) -> float:
        """Time for requests in flight at the end; 0 if the last host was killed."""
        if self.has(_USER):
            return math.inf
        return 0.0 if self._is_lost else _DRAIN_MAX_S

    def has(self, host: int) -> bool:
        return host in self._hosts

    @contextmanager
    def join(self) -> Iterator[int]:
        """Be a host for the block; yields its number. Raises DaemonStopping if none is left."""
        self._check_serving()
        self._joined += 1
        host = self._joined
        self._hosts.add(host)
        self._emit("host.joined", host=host, hosts=self._count())
        try:
            yield host
        finally:
            self.lose(host)

    def lose(self, host: int) -> None:
        """Remove a host that has disappeared; no effect if it has left."""
        self._is_lost |= self._hosts == {host}
        self.leave(host)

    def leave(self, host: int) -> None:
        """Remove a host; no effect if it has left."""
        if not self.has(host):
            return
        self._hosts.remove(host)
        if host != STARTER:
            self._emit("host.left", host=host, hosts=self._count())
        if self.is_empty:
            self._on_empty()

    def keep(self) -> None:
        """Outlive all hosts, until a shutdown. Raises DaemonStopping if none is left."""
        self._check_serving()
        self._hosts.add(_USER)

    def _check_serving(self) -> None:
        if self.is_empty:
            raise DaemonStopping("the daemon is stopping", hint="retry when it has ended")

    def _count(self) -> int:
        return len(self._hosts - {STARTER, _USER})


def backend_hosts(hosts: DesktopHosts | None) -> DesktopHosts:
    """Return the hosts of a daemon; raises DaemonBusy if it is no desktop backend."""
    if hosts is None:
        raise DaemonBusy(
            "the daemon that runs in this runtime directory is not a desktop backend",
            hint="corral stop ends it; or set CORRAL_RUNTIME_DIR to a directory of the application",
        )
    return hosts


_READ_BYTES: Final = 4096


@contextmanager
def exit_with_starter(descriptor: int) -> Iterator[None]:
    """Exit at once if the pipe is closed within the block, which must need no clean-up."""
    done, end = os.pipe()

    def exit_when_closed() -> None:
        poll = select.poll()
        for fd in (descriptor, done):
            poll.register(fd, 0)  # POLLHUP is always reported; source: poll(2)
        if descriptor in dict(poll.poll()):
            os._exit(0)

    thread = threading.Thread(target=exit_when_closed)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(done)


@contextmanager
def watch_starter(descriptor: int, on_closed: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(descriptor, _READ_BYTES):
            loop.remove_reader(descriptor)
            on_closed()

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
