"""Commands that set llama-corral up: settings from what people use already."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, Models, finish, offer

commands = typer.Typer()


@commands.command()
def init(
    models: Models = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a settings file; a backup is kept.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Write a commented corral.toml for this machine and the models that are stored here."""
    from supervisor.commands.init import init as call

    finish("init", lambda: call(models or [], config, is_forced=force), as_json=as_json)


@commands.command("import")
def import_settings(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | -- COMMAND...",
            help="A llama-swap YAML, a router preset (.ini), a Modelfile, a file with a command; "
            "- reads standard input. After two dashes: the words of a llama-server command.",
        ),
    ],
    kind: Annotated[
        Literal["command", "llama-swap", "router", "modelfile"] | None,
        typer.Option("--from", help="What it is. Unset: by its content."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write it into corral.toml, with a backup beside it.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Turn settings of other programs into corral.toml, and list what has no equivalent."""
    from supervisor.commands.import_settings import import_settings as call

    finish("import", lambda: call(source, kind, config, is_written=write), as_json=as_json)


@commands.command()
def connect(  # noqa: PLR0913, PLR0917 (a command has its options)
    client: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLIENT]",
            help="A client program; none lists them.",
            autocompletion=offer("client"),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="For most requests. Unset: the default model, or one that is loaded.",
            autocompletion=offer("model"),
        ),
    ] = None,
    small: Annotated[
        str | None,
        typer.Option(
            help="For short requests, such as titles. Unset: the same.",
            autocompletion=offer("model"),
        ),
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Check with one request, then write; each file has a backup."),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take back what --write wrote; the rest stays.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="With --write: send a request first.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show a client's settings for the running daemon, write them, or take them back."""
    from supervisor.commands import connect as calls

    if client is None:
        if write or undo:
            raise typer.BadParameter("--write and --undo need a CLIENT")
        finish("connect", calls.list_clients, as_json=as_json)
        return
    if write and undo:
        raise typer.BadParameter("choose one of --write and --undo")
    if undo:
        finish("connect", lambda: calls.undo(client), as_json=as_json)
    if write:
        finish("connect", lambda: calls.write(client, model, small, checks=check), as_json=as_json)
    finish("connect", lambda: calls.show(client, model, small), as_json=as_json)
