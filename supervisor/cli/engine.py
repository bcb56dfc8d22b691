"""`corral engine`: llama-server binaries."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, finish

Build = Annotated[str, typer.Argument(metavar="BUILD", help="Such as b10434 or b10434-vulkan.")]

commands = typer.Typer(help="llama-server binaries on this machine.", no_args_is_help=True)


@commands.command("list")
def engine_list(config: Config = None, as_json: Json = False) -> None:
    """List all llama-server builds found; the first is the one in use."""
    from supervisor.commands.engine import list_engines as call

    finish("engine list", lambda: call(config), as_json=as_json)


@commands.command("path")
def engine_path(config: Config = None, as_json: Json = False) -> None:
    """Print the path of the llama-server in use."""
    from supervisor.commands.engine import path as call

    finish("engine path", lambda: call(config), as_json=as_json)


@commands.command("help")
def engine_help(
    flag: Annotated[str | None, typer.Argument(help="One flag; none means all.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the options of the llama-server in use, read from its --help."""
    from supervisor.commands.engine import show_help as call

    finish("engine help", lambda: call(flag, config), as_json=as_json)


@commands.command("use")
def engine_use(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Use an installed build, from each model's next start; `corral reload` replaces what runs."""
    from supervisor.commands.engine_use import use as call

    finish("engine use", lambda: call(name, config), as_json=as_json)


@commands.command("rollback")
def engine_rollback(config: Config = None, as_json: Json = False) -> None:
    """Use the build that was in use before; each further rollback goes one more back."""
    from supervisor.commands.engine_use import rollback as call

    finish("engine rollback", lambda: call(config), as_json=as_json)


@commands.command("remove")
def engine_remove(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Remove an installed build that nothing uses."""
    from supervisor.commands.engine_use import remove as call

    finish("engine remove", lambda: call(name, config), as_json=as_json)
