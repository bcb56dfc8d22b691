"""`corral profile`: named sets of flags."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, finish, offer

commands = typer.Typer(help="Named sets of tuned flags.", no_args_is_help=True)


@commands.command("list")
def profile_list(as_json: Json = False) -> None:
    """List the profiles, shipped and your own."""
    from supervisor.commands.profile import list_profiles as call

    finish("profile list", call, as_json=as_json)


@commands.command("show")
def profile_show(
    name: Annotated[str, typer.Argument(autocompletion=offer("profile"))], as_json: Json = False
) -> None:
    """Show a profile's flags, with those it inherits."""
    from supervisor.commands.profile import show_profile as call

    finish("profile show", lambda: call(name), as_json=as_json)


@commands.command("check")
def profile_check(
    name: Annotated[
        str | None,
        typer.Argument(help="One profile; none means all.", autocompletion=offer("profile")),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Check profiles against the llama-server in use."""
    from supervisor.commands.profile import check as call

    finish("profile check", lambda: call(name, config), as_json=as_json)
