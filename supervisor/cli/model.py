"""`corral model`: GGUF files."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Config, Json, Yes, ask, finish

commands = typer.Typer(help="GGUF files.", no_args_is_help=True)


@commands.command("get")
def model_get(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="OWNER/NAME[:QUANT], a URL, or a pinned name.")
    ],
    projector: Annotated[bool, typer.Option(help="Take the projector of the model too.")] = True,
    draft: Annotated[bool, typer.Option(help="Take its draft model or draft heads too.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would come; fetch nothing.")
    ] = False,
    as_lines: Annotated[bool, typer.Option("--lines", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Download a model, unless it is there and complete.

    Without QUANT, the quantisation that fits this machine is chosen. A broken download continues.
    """
    from supervisor.commands.model_get import GetOptions
    from supervisor.commands.model_get import get as call

    options = GetOptions(projector, draft, dry_run, as_lines)
    finish("model get", lambda: call(name, options), as_json=as_json)


@commands.command("search")
def model_search(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words of its name.")],
    limit: Annotated[int, typer.Option(min=1, max=50, help="How many to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Search the hub for GGUF models; the most downloaded first."""
    from supervisor.commands.model_search import search as call

    finish("model search", lambda: call(" ".join(words), limit), as_json=as_json)


@commands.command("list")
def model_list(config: Config = None, as_json: Json = False) -> None:
    """List the models on this machine, wherever they are kept, and the space that they take.

    Looks into our own directory, those of `models_dir`, the Hugging Face cache, and the stores of
    llama.cpp, LM Studio and Ollama. `corral start NAME` serves any of them.
    """
    from supervisor.commands.model_list import list_models as call

    finish("model list", lambda: call(config), as_json=as_json)


@commands.command("show")
def model_show(file: str, as_json: Json = False) -> None:
    """Show the metadata of a GGUF file."""
    from supervisor.commands.model import show_model as call

    finish("model show", lambda: call(file), as_json=as_json)


@commands.command("remove")
def model_remove(
    name: Annotated[str, typer.Argument(help="A name of `corral model list`.")],
    yes: Yes = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete a downloaded model, unless an engine serves it or another program keeps it."""
    from supervisor.commands.model_remove import remove as call

    finish("model remove", lambda: call(name, config, ask(), yes=yes), as_json=as_json)


@commands.command("prune")
def model_prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show, and delete nothing.")] = False,
    yes: Yes = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete unfinished downloads, and files of models that nothing uses."""
    from supervisor.commands.model_remove import prune as call

    finish("model prune", lambda: call(config, ask(), yes=yes, dry_run=dry_run), as_json=as_json)
