"""Shared options of commands, parsers of times and sizes, and the end of each command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from supervisor.output import CommandResult, printable, run_command

if TYPE_CHECKING:
    from supervisor.cli.targets import Kind

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES: Final = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_UNIT_CHARACTERS: Final = 3


def read_seconds(text: str) -> float:
    """Parse a time such as `10m`, `90s` or `2h`; raises BadParameter."""
    unit = _SECONDS.get(text[-1:])
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is not a time; write 90s, 10m or 2h") from error


def read_bytes(text: str) -> int:
    """Parse a size such as `64MiB`, `64 MiB` or a number of bytes; raises BadParameter."""
    unit = _BYTES.get(text[-_UNIT_CHARACTERS:])
    try:
        return int(float(text[:-_UNIT_CHARACTERS]) * unit) if unit else int(text)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text} is not a size; write 64MiB or 1GiB") from error


def read_flag(text: str) -> tuple[str, bool | int | float | str]:
    """Parse a flag such as `threads=4`; raises BadParameter."""
    key, is_given, value = text.partition("=")
    if not (key and is_given):
        raise typer.BadParameter(f"{text} is not a setting; write KEY=VALUE")
    return key.strip().lstrip("-"), _flag_value(value.strip())


def _flag_value(text: str) -> bool | int | float | str:
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def offer(kind: Kind) -> Callable[[str], list[str]]:
    """Return a function for the shell that completes words of this kind."""

    def complete(incomplete: str) -> list[str]:
        from supervisor.cli.targets import complete_word

        return complete_word(kind, incomplete)

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
    raise typer.Exit(run_command(command, call, as_json=as_json))


def ask() -> Callable[[str], bool] | None:
    """Return a function that asks a yes-or-no question; None without a terminal."""
    if not sys.stdin.isatty():
        return None
    return lambda question: typer.confirm(printable(question), err=True)


def names_of(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))
