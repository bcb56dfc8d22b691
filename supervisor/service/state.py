"""The state of the service, as systemd tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from supervisor.service.facts import Scope
from supervisor.service.files import SERVICE, SOCKET
from supervisor.service.systemctl import systemctl

_PROPERTIES: Final = (
    "LoadState", "ActiveState", "SubState", "UnitFileState", "StatusText", "MainPID", "Result",
    "NRestarts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServiceState:
    is_installed: bool
    is_active: bool
    state: str
    is_enabled: bool
    text: str
    pid: int | None
    result: str
    restarts: int
    socket: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def service_state(scope: Scope) -> ServiceState:
    """Raises ServiceFailed where systemd does not answer."""
    shown = _shown(scope, SERVICE)
    socket = _shown(scope, SOCKET)
    return ServiceState(
        is_installed=shown.get("LoadState") not in {None, "", "not-found"},
        is_active=shown.get("ActiveState") in {"active", "reloading"},
        state=f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', 'unknown')})",
        is_enabled=shown.get("UnitFileState") == "enabled",
        text=shown.get("StatusText", ""),
        pid=int(shown.get("MainPID") or 0) or None,
        result=shown.get("Result", ""),
        restarts=int(shown.get("NRestarts") or 0),
        socket=f"{socket.get('ActiveState', 'unknown')} ({socket.get('SubState', 'unknown')})",
    )


def _shown(scope: Scope, unit: str) -> dict[str, str]:
    text = systemctl(scope, "show", unit, f"--property={','.join(_PROPERTIES)}")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
