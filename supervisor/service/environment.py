"""What the service manager gave this process."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Final

from supervisor.service.activation import activation_sockets, listen_address
from supervisor.service.notification import watchdog_s
from supervisor.service.notifier import ServiceNotifier
from supervisor.service.notify_socket import open_notify_socket

_VARIABLES: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServiceEnvironment:
    """Without a service manager, the notifier sends nothing, and there are no `sockets`."""

    notifier: ServiceNotifier = field(default_factory=ServiceNotifier)
    sockets: tuple[socket.socket, ...] = ()

    @property
    def listen(self) -> str | None:
        """The address of the sockets, which applies in place of `listen` under [proxy]."""
        return listen_address(self.sockets)


def take_service_environment(
    environ: MutableMapping[str, str] = os.environ,
) -> ServiceEnvironment:
    """Read the variables and remove them, so that no child speaks in our name.

    Raises:
        SettingsInvalid: A socket cannot be used.
    """
    found = {name: value for name in _VARIABLES if (value := environ.pop(name, ""))}
    pid = os.getpid()
    notifier = ServiceNotifier(open_notify_socket(found), watchdog_s(found, pid))
    return ServiceEnvironment(notifier, activation_sockets(found, pid))
