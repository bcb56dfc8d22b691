"""`corral slots`: where prompts are kept; conversations on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, Names, finish, offer

commands = typer.Typer(
    help="Where prompts are kept: in slots, in memory, on disk.", invoke_without_command=True
)


@commands.callback()
def slots(context: typer.Context, as_json: Json = False) -> None:
    """Show where the prompts of each model are kept, and how much computing that saved."""
    if context.invoked_subcommand is not None:
        return
    from supervisor.commands.slot_tiers import show_tiers as call

    finish("slots", call, as_json=as_json)


@commands.command("list")
def slots_list(as_json: Json = False) -> None:
    """List the saved conversations."""
    from supervisor.commands.slots import list_slots as call

    finish("slots list", call, as_json=as_json)


@commands.command("save")
def slots_save(models: Names = None, as_json: Json = False) -> None:
    """Save the idle slots of running models now."""
    from supervisor.commands.slots import save as call

    finish("slots save", lambda: call(models or []), as_json=as_json)


@commands.command("forget")
def slots_forget(
    model: Annotated[
        str | None, typer.Argument(help="The model.", autocompletion=offer("model"))
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    conversation: Annotated[
        str | None,
        typer.Option("--conversation", "-c", metavar="NAME", help="One, of `corral slots list`."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="ID", help="That of a recent request, of `corral requests`."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete saved conversations and learned prompts, or one conversation everywhere.

    Works without a daemon, but for --request.
    """
    from supervisor.commands.forget_slots import forget as call

    asked = {"model": model, "conversation": conversation, "request": request}
    finish("slots forget", lambda: call(**asked, everything=everything), as_json=as_json)


@commands.command("new-key")
def slots_new_key(
    file: Annotated[
        Path | None,
        typer.Argument(help="Unset: the file of the settings, else slots.key beside them."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a key that encrypts saved conversations; one more in a file that has keys."""
    from supervisor.commands.slot_key import new as call

    finish("slots new-key", lambda: call(file, config), as_json=as_json)
