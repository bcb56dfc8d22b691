"""Sends messages to the service manager, one datagram each."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

# It reads them at once; a message that does not fit waits no longer than this.
_SEND_TIMEOUT_S: Final = 0.1

Send = Callable[[str], None]


def open_notify_socket(environ: Mapping[str, str]) -> Send | None:
    """Return a function that sends a message, or None where no service manager wants any.

    It never raises: a service works without its manager. `@` begins an abstract address.
    Source: sd_notify(3), unix(7).
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    target = f"\0{address[1:]}" if address.startswith("@") else address

    def send(message: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_SEND_TIMEOUT_S)
            channel.sendto(message.encode(errors="backslashreplace"), target)

    return send
