"""Listening sockets that the service manager passes to this process.

The manager keeps them open over a restart, so connections wait in them until a daemon accepts them.
Source: sd_listen_fds(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from proxy.config.address import is_loopback
from supervisor.errors import SettingsInvalid

_FIRST: Final = 3
_SOCKETS_MAX: Final = 16


def activation_sockets(environ: Mapping[str, str], pid: int) -> tuple[socket.socket, ...]:
    """Take the sockets that are meant for this process; () without a service manager.

    Raises:
        SettingsInvalid: One is not a listening TCP socket, or there are too many.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return ()
    count = _count(environ.get("LISTEN_FDS", ""))
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    found = [*range(_FIRST, _FIRST + count)]
    return tuple(_socket(one, name) for one, name in zip(found, _padded(names), strict=False))


def listen_address(sockets: Sequence[socket.socket]) -> str | None:
    """Return HOST:PORT of the sockets as `listen` under [proxy]; None without any.

    Where several listen, it is one that other machines reach, because stricter rules hold there.
    """
    addresses = [one.getsockname()[:2] for one in sockets]
    open_first = sorted(addresses, key=lambda address: is_loopback(address[0]))
    return next((f"{_bracketed(host)}:{port}" for host, port in open_first), None)


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0
    if count > _SOCKETS_MAX:
        raise SettingsInvalid(
            f"the service manager passed {count} sockets; at most {_SOCKETS_MAX} are used",
            hint="remove lines ListenStream= of the .socket unit",
        )
    return count


def _padded(names: Sequence[str]) -> Iterator[str]:
    yield from names
    while True:
        yield "unknown"


def _socket(descriptor: int, name: str) -> socket.socket:
    os.set_inheritable(descriptor, False)  # noqa: FBT003 (positional only)
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _refused(descriptor, name) from error
    if not _listens(found):
        found.detach()
        raise _refused(descriptor, name)
    return found


def _listens(found: socket.socket) -> bool:
    is_tcp = found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _refused(descriptor: int, name: str) -> SettingsInvalid:
    return SettingsInvalid(
        f"descriptor {descriptor} ({name}) of the service manager is not a listening TCP socket",
        hint="the .socket unit needs ListenStream=ADDRESS:PORT and Accept=no",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
