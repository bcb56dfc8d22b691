"""`corral hooks`: commands that run when something happens."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, finish, offer

commands = typer.Typer(help="Commands run on events.", invoke_without_command=True)


@commands.callback()
def hooks(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """List the commands that [hooks] of corral.toml runs when something happens."""
    if context.invoked_subcommand is None:
        from supervisor.commands.hooks import list_hooks as call

        finish("hooks", lambda: call(config), as_json=as_json)


@commands.command("test")
def hooks_test(
    name: Annotated[
        str,
        typer.Argument(metavar="HOOK", help="As model_loaded.", autocompletion=offer("hook")),
    ],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Run the commands of a hook with an example event, and show what they print."""
    from supervisor.commands.hooks import try_hook as call

    finish("hooks test", lambda: call(name, config), as_json=as_json)
