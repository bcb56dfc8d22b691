"""The `.service` unit, from the settings and the place of the program. Pure."""

from __future__ import annotations

from supervisor.errors import SettingsInvalid
from supervisor.service.credentials import credential_lines
from supervisor.service.facts import ACCOUNT, NAME, ServiceFacts
from supervisor.service.sandbox import UNPRIVILEGED, system_sandbox
from supervisor.service.socket_unit import socket_unit
from supervisor.service.unit_text import assignment, command_line, escaped, unit_text

_KINDS = ("Configuration", "State", "Cache", "Logs", "Runtime")


def service_unit(facts: ServiceFacts) -> str:
    is_system = facts.scope == "system"
    target = "multi-user.target" if is_system else "default.target"
    return unit_text(
        f"{NAME}.service",
        ("Unit", _unit(facts)),
        ("Service", [*_run(facts), *(_system(facts) if is_system else UNPRIVILEGED)]),
        ("Install", [f"WantedBy={target}"]),
    )


def _unit(facts: ServiceFacts) -> list[str]:
    socket = f"{NAME}.socket" if socket_unit(facts.settings.proxy) else None
    return [
        "Description=llama-corral, llama-server processes behind one proxy",
        f"After=network.target{f' {socket}' if socket else ''}",
        *([f"Requires={socket}"] if socket else []),
        "StartLimitIntervalSec=120",
        "StartLimitBurst=10",
    ]


def _run(facts: ServiceFacts) -> list[str]:
    environment = [
        f"Environment={assignment(name, escaped(value))}"
        for name, value in facts.environment.items()
    ]
    return [
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={command_line(facts.serve)}",
        f"ExecReload={command_line((*facts.command, 'reload'))}",
        *environment,
        f"SyslogIdentifier={NAME}",
        "Restart=on-failure",
        "RestartSec=5",
        # A restart does not mend settings.
        f"RestartPreventExitStatus={SettingsInvalid.exit_code}",
        "WatchdogSec=60",
        f"TimeoutStopSec={facts.stop_timeout_s}",
        # The daemon stops its engines itself, after running requests.
        "KillMode=mixed",
        # An engine that the kernel kills for memory is restarted alone.
        "OOMPolicy=continue",
        # For models with mlock.
        "LimitMEMLOCK=infinity",
    ]


def _system(facts: ServiceFacts) -> list[str]:
    # By mode 0700, no other user reads conversations or logs.
    directories = [
        line
        for kind in _KINDS
        for line in (
            f"{kind}Directory={NAME}",
            *([f"{kind}DirectoryMode=0700"] if kind != "Configuration" else []),
        )
    ]
    groups = [f"SupplementaryGroups={' '.join(facts.groups)}"] if facts.groups else []
    return [
        f"User={ACCOUNT}",
        *groups,
        *directories,
        *credential_lines(facts.settings),
        *system_sandbox(facts.read_paths),
    ]
