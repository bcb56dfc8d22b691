"""The files of a service, and where they belong. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.service.facts import ACCOUNT, NAME, ServiceFacts
from supervisor.service.service_unit import service_unit
from supervisor.service.socket_unit import socket_unit
from supervisor.service.unit_text import MARK

SERVICE: Final = f"{NAME}.service"
SOCKET: Final = f"{NAME}.socket"
_STATE: Final = f"/var/lib/{NAME}"


@dataclass(frozen=True, slots=True)
class ServicePaths:
    """Directories of unit files, and of files that declare accounts."""

    units: Path
    accounts: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that an installation may have."""
        return (
            self.units / SERVICE,
            self.units / SOCKET,
            *([self.accounts / f"{NAME}.conf"] if self.accounts else []),
        )


SYSTEM_PATHS: Final = ServicePaths(Path("/etc/systemd/system"), Path("/etc/sysusers.d"))


def service_files(facts: ServiceFacts, paths: ServicePaths) -> dict[Path, str]:
    """Return the text of each file."""
    socket = socket_unit(facts.settings.proxy)
    files = {paths.units / SERVICE: service_unit(facts)}
    files |= {paths.units / SOCKET: socket} if socket else {}
    if paths.accounts:
        files[paths.accounts / f"{NAME}.conf"] = account()
    return files


def account() -> str:
    """Return the declaration of the account, which never logs in. Source: sysusers.d(5)."""
    return f'{MARK}\n# another file of this directory.\nu {ACCOUNT} - "llama-corral" {_STATE}\n'
