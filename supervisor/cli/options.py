"""Options that several commands have, and how each command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supervisor.output import CommandResult, printable, run_command

if TYPE_CHECKING:
    from supervisor.commands.completion import Kind


def offer(kind: Kind) -> Callable[[str], list[str]]:
    """Return a function that completes a word of the command line in the shell."""

    def complete(incomplete: str) -> list[str]:
        from supervisor.commands.completion import offered

        return offered(kind, incomplete)

    return complete


Json = Annotated[bool, typer.Option("--json", help="Print one JSON envelope.")]
Config = Annotated[Path | None, typer.Option("--config", help="Read this settings file.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Listen = Annotated[str | None, typer.Option("--listen", help="HOST:PORT for clients; port 0: any.")]
Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Names from corral.toml, fetched models, or GGUFs.",
        autocompletion=offer("model"),
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...", help="Names; none means all.", autocompletion=offer("model")
    ),
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", autocompletion=offer("model"))]


def finish(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> None:
    """Run a command, show its result, and exit with its code."""
    raise typer.Exit(run_command(command, call, as_json=as_json))


def ask() -> Callable[[str], bool] | None:
    """Return how to ask a question with yes or no; None without a terminal."""
    if not sys.stdin.isatty():
        return None
    return lambda question: typer.confirm(printable(question), err=True)


def names_of(text: str) -> tuple[str, ...]:
    """Read names that commas separate."""
    return tuple(name for part in text.split(",") if (name := part.strip()))
