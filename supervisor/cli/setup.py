"""Commands that set llama-corral up: settings from what people use already."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, Models, finish

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
