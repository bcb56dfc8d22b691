"""What the service manager gave this process."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Final

from supervisor.service.notification import watchdog_s
from supervisor.service.notifier import ServiceNotifier
from supervisor.service.notify_socket import open_notify_socket

_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True, slots=True)
class ServiceEnvironment:
    """Without a service manager, the notifier sends nothing."""

    notifier: ServiceNotifier = field(default_factory=ServiceNotifier)


def take_service_environment(
    environ: MutableMapping[str, str] = os.environ,
) -> ServiceEnvironment:
    """Read the variables and remove them, so that no child speaks in our name."""
    found = {name: value for name in _VARIABLES if (value := environ.pop(name, ""))}
    limit_s = watchdog_s(found, os.getpid())
    return ServiceEnvironment(ServiceNotifier(open_notify_socket(found), limit_s))
