"""`corral model`: GGUF files."""

from __future__ import annotations

import typer

from supervisor.cli.options import Json, finish

commands = typer.Typer(help="GGUF files.", no_args_is_help=True)


@commands.command("get")
def model_get(name: str, as_json: Json = False) -> None:
    """Download a pinned model, unless it is there and complete."""
    from supervisor.commands.model import get as call

    finish("model get", lambda: call(name), as_json=as_json)


@commands.command("list")
def model_list(as_json: Json = False) -> None:
    """List the pinned models, and whether each was downloaded."""
    from supervisor.commands.model import list_models as call

    finish("model list", call, as_json=as_json)


@commands.command("show")
def model_show(file: str, as_json: Json = False) -> None:
    """Show the metadata of a GGUF file."""
    from supervisor.commands.model import show_model as call

    finish("model show", lambda: call(file), as_json=as_json)
