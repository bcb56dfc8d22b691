"""`corral config`: the settings file."""

from __future__ import annotations

import typer

from supervisor.cli.options import Config, Json, finish

commands = typer.Typer(help="The settings file, corral.toml.", no_args_is_help=True)


@commands.command("check")
def config_check(config: Config = None, as_json: Json = False) -> None:
    """Check the settings and plan every model, without starting anything."""
    from supervisor.commands.config import check as call

    finish("config check", lambda: call(config), as_json=as_json)


@commands.command("show")
def config_show(config: Config = None, as_json: Json = False) -> None:
    """Show the value and origin of every setting."""
    from supervisor.commands.config import show_settings as call

    finish("config show", lambda: call(config), as_json=as_json)


@commands.command("path")
def config_path(config: Config = None, as_json: Json = False) -> None:
    """Show the settings file and all directories."""
    from supervisor.commands.config import paths as call

    finish("config path", lambda: call(config), as_json=as_json)
