"""`corral record`: recorded sizes and pauses of requests."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Json, finish, offer

commands = typer.Typer(help="Sizes and pauses of requests on disk.", no_args_is_help=True)


@commands.command("show")
def record_show(as_json: Json = False) -> None:
    """Show how many requests of each model are recorded: figures only, no text."""
    from supervisor.commands.record import show as call

    finish("record show", call, as_json=as_json)


@commands.command("forget")
def record_forget(
    model: Annotated[
        str | None, typer.Argument(help="The model.", autocompletion=offer("model"))
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded figures; works without a daemon."""
    from supervisor.commands.record import forget as call

    finish("record forget", lambda: call(model, everything=everything), as_json=as_json)
