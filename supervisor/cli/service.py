"""`corral service`: the daemon under systemd."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, finish

commands = typer.Typer(help="The daemon as a service of systemd.", no_args_is_help=True)

IsUser = Annotated[
    bool | None,
    typer.Option(
        "--user/--system", help="Of this user, or of the system. Unset: of the system for root."
    ),
]


def _scope(is_user: bool | None) -> Literal["user", "system"]:  # noqa: FBT001 (an option's value)
    is_root = os.geteuid() == 0
    return "user" if is_user or (is_user is None and not is_root) else "system"


@commands.command("install")
def service_install(
    user: IsUser = None,
    config: Config = None,
    start: Annotated[bool, typer.Option(help="Start it, and apply changes, at once.")] = True,
    as_json: Json = False,
) -> None:
    """Write the units, enable and start them. Repeat it after changes of listen, limits or keys.

    A service of the system runs as the user llama-corral, with /etc/llama-corral/corral.toml.
    """
    from supervisor.commands.service import install as call

    finish("service install", lambda: call(_scope(user), config, start=start), as_json=as_json)


@commands.command("uninstall")
def service_uninstall(user: IsUser = None, as_json: Json = False) -> None:
    """Stop the service and remove its units; settings and data stay."""
    from supervisor.commands.service import uninstall as call

    finish("service uninstall", lambda: call(_scope(user)), as_json=as_json)


@commands.command("status")
def service_status(user: IsUser = None, as_json: Json = False) -> None:
    """Show the state of the service. Exits with 3 if it is not active."""
    from supervisor.commands.service import status as call

    finish("service status", lambda: call(_scope(user)), as_json=as_json)


@commands.command("show")
def service_show(
    user: IsUser = None,
    config: Config = None,
    kind: Annotated[
        Literal["systemd", "launchd", "windows"] | None,
        typer.Option("--format", help="Unset: of this system. launchd and windows are untested."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the units, a launch agent or a note for Windows; install nothing."""
    from supervisor.commands.service import show as call

    finish("service show", lambda: call(_scope(user), config, kind), as_json=as_json)
