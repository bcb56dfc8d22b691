"""What the service may not do. Pure.

Source: systemd.exec(5), systemd.resource-control(5).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

# Of a user's manager too: they need no privileges.
UNPRIVILEGED: Final = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    # Netlink tells programs the addresses of this machine.
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)
# Without MemoryDenyWriteExecute: GPU drivers compile shaders at run time.
_PRIVILEGED: Final = (
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "RemoveIPC=yes",
    "KeyringMode=private",
    "DevicePolicy=closed",
    "DeviceAllow=char-drm rw",
    "DeviceAllow=char-kfd rw",
    "DeviceAllow=char-nvidia* rw",
)
# The directories that `ProtectHome=` and `PrivateTmp=` hide. Source: systemd.exec(5).
_HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))
_TEMPORARY: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 (nothing is written there)


def system_sandbox(read_paths: Iterable[Path]) -> list[str]:
    """Return the lines of a system service that reads these paths."""
    paths = tuple(read_paths)

    def has_path_below(directories: Iterable[Path]) -> bool:
        return any(path.is_relative_to(parent) for path in paths for parent in directories)

    return [
        *UNPRIVILEGED,
        *_PRIVILEGED,
        f"ProtectHome={'read-only' if has_path_below(_HOMES) else 'yes'}",
        f"PrivateTmp={'no' if has_path_below(_TEMPORARY) else 'yes'}",
    ]
