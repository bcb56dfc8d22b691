"""The address of a worker. Pure, but for the choice of a free port."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from supervisor.errors import SettingsInvalid
from supervisor.host.exposure import exposure

LOOPBACK: Final = "127.0.0.1"
UNPROTECTED: Final = (
    "its protocol has no authentication and no encryption: any program that reaches it can "
    "read the model and the texts, and run code"
)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens; port 0 is not chosen yet."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def check_listen_host(host: str) -> str | None:
    """Return a warning for an address that other machines reach, or None.

    Raises:
        SettingsInvalid: It is no IPv4 address, or all machines could reach it.
    """
    match exposure(host):
        case "loopback":
            return None
        case "private":
            return f"a worker that listens on {host} is reached by other machines; {UNPROTECTED}"
        case None:
            raise SettingsInvalid(
                f"a worker cannot listen on {host}: it takes an IPv4 address only",
                hint="name a private address of this machine, such as 192.168.1.7",
            )
        case _:
            raise SettingsInvalid(
                f"a worker does not listen on {host}: {UNPROTECTED}",
                hint="name one private address of this machine, such as 192.168.1.7; across "
                "networks, use a tunnel (WireGuard, ssh -L)",
            )


def free_port(host: str = LOOPBACK) -> int:
    """Choose a port that is free now; raises OSError where the address is not this machine's."""
    with socket.socket(socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def check_port(address: WorkerAddress) -> None:
    """Check that a worker can listen: the program reports a taken port only after its start.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """
    with socket.socket(socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address.host, address.port))
