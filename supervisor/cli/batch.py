"""`corral batch`: files of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supervisor.cli.options import Json, finish

commands = typer.Typer(help="Files of requests, computed as batches.", no_args_is_help=True)

Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Write the results there, and errors beside it."),
]


@commands.command("run")
def batch_run(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Requests, one a line.")],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compute a file of requests in OpenAI's batch format, and write the results beside it.

    Exits with 1 if a line failed. After Ctrl-C the batch goes on, after a second one it is
    cancelled. Where the daemon needs an API key, it is read from CORRAL_API_KEY.
    """
    from supervisor.commands.batch import run as call

    finish("batch run", lambda: call(file, output), as_json=as_json)


@commands.command("list")
def batch_list(as_json: Json = False) -> None:
    """List the newest batches."""
    from supervisor.commands.batch import list_batches as call

    finish("batch list", call, as_json=as_json)


@commands.command("show")
def batch_show(batch: str, output: Output = None, as_json: Json = False) -> None:
    """Show how far a batch is, and what is wrong with its lines."""
    from supervisor.commands.batch import show as call

    finish("batch show", lambda: call(batch, output), as_json=as_json)


@commands.command("cancel")
def batch_cancel(batch: str, as_json: Json = False) -> None:
    """Cancel a batch; the results that it has are kept."""
    from supervisor.commands.batch import cancel as call

    finish("batch cancel", lambda: call(batch), as_json=as_json)
