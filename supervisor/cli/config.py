"""`corral config`: the settings file."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, finish, offer

commands = typer.Typer(help="The settings file, corral.toml.", no_args_is_help=True)

SettingKey = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="A dotted key, as proxy.listen.", autocompletion=offer("setting")
    ),
]


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


@commands.command("set")
def config_set(
    key: SettingKey,
    value: Annotated[str, typer.Argument(help="A TOML value, or a text without quotes.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Set one value in corral.toml; its comments stay, and invalid settings are refused."""
    from supervisor.commands.config_change import set_value as call

    finish("config set", lambda: call(key, value, config), as_json=as_json)


@commands.command("unset")
def config_unset(key: SettingKey, config: Config = None, as_json: Json = False) -> None:
    """Take one value or table out of corral.toml; its comments stay."""
    from supervisor.commands.config_change import unset_value as call

    finish("config unset", lambda: call(key, config), as_json=as_json)


@commands.command("schema")
def config_schema(
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write it beside corral.toml, whose first line then tells editors."
        ),
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the JSON Schema of corral.toml, with the meaning of every setting."""
    from supervisor.commands.config_schema import schema, write_schema

    finish("config schema", lambda: write_schema(config) if write else schema(), as_json=as_json)
