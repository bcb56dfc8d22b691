"""Shared options of commands, parsers of times and sizes, and the end of each command."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import typer
from typer import Argument, BadParameter, Context, Option

from supervisor.output import CommandResult, run_command

if TYPE_CHECKING:
    from supervisor.cli.targets import Kind

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES: Final = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_UNIT_CHARACTERS: Final = 3
_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])")


def seconds_of(text: str) -> float | None:
    """Parse a time such as `90s`, `10m`, `2h` or `1d`; None if it is none."""
    found = _TIME.fullmatch(text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


# The same as `supervisor.daemon.operations.LIMIT_MAX_S`, which is slow to import.
LIMIT_MAX_S: Final = 31 * 86_400


def read_seconds(text: str) -> float:
    """Parse a time, or a number of seconds; raises BadParameter."""
    try:
        return float(text) if (found := seconds_of(text)) is None else found
    except ValueError as error:
        raise BadParameter(f"{text} is not a time; write 90s, 10m or 2h") from error


def read_bytes(text: str) -> int:
    """Parse a size such as `64MiB`, `64 MiB` or a number of bytes; raises BadParameter."""
    unit = _BYTES.get(text[-_UNIT_CHARACTERS:])
    try:
        return int(float(text[:-_UNIT_CHARACTERS]) * unit) if unit else int(text)
    except (ValueError, OverflowError) as error:
        raise BadParameter(f"{text} is not a size; write 64MiB or 1GiB") from error


def read_flag(text: str) -> tuple[str, bool | int | float | str]:
    """Parse a flag such as `threads=4`; raises BadParameter."""
    key, is_given, value = text.partition("=")
    if not (key and is_given):
        raise BadParameter(f"{text} is not a setting; write KEY=VALUE")
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


def word(kind: Kind, *names: str, help: str | None = None, metavar: str | None = None) -> Any:  # noqa: A002 (Typer's name)
    """Return an argument, or an option with these names, whose words the shell completes."""
    if names:
        return Option(*names, help=help, autocompletion=offer(kind))
    return Argument(help=help, metavar=metavar, autocompletion=offer(kind))


def words(text: str) -> Any:
    """Return an argument of any number of models."""
    return Argument(
        help=text,
        metavar="[MODEL]...",
        autocompletion=offer("model"),
        default_factory=list,
        show_default=False,
    )


Config = Annotated[Path | None, Option("--config", help="Read this settings file.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
Listen = Annotated[str | None, Option("--listen", help="HOST:PORT for clients; port 0: any.")]
Models = Annotated[list[str], words("Names from corral.toml, fetched models, or GGUFs.")]
Names = Annotated[list[str], words("Names; none means all.")]
ModelName = Annotated[str, word("model", metavar="MODEL")]
Everywhere = Annotated[bool, Option("--all", help="Show this machine and all nodes.")]
Json = Annotated[bool, Option("--json", help="Print one JSON envelope.")]


# An entry of a section Args: the name, and the text with its further lines.
_HELP: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _with_help(parameter: inspect.Parameter, text: str | None) -> inspect.Parameter:
    if text is None:  # an option that commands share, with its own help
        return parameter
    hint = parameter.annotation
    if get_origin(hint) is Annotated:
        hint, given = get_args(hint)
    elif parameter.default is parameter.empty:
        given = Argument()
    else:
        is_switch = hint is bool and not parameter.default
        given = Option(*([f"--{parameter.name.replace('_', '-')}"] if is_switch else ()))
    given.help = " ".join(text.split())
    return parameter.replace(annotation=Annotated[hint, given])


def verb(
    group: typer.Typer, target: str = "", *, name: str = "", has_json: bool = True
) -> Callable[[Callable[..., CommandResult | None]], Callable[..., None]]:
    """Make a function a command of a group, with --json, which shows its result and exits.

    A command with the name of its group runs if the group is called without a command. The section
    Args of its docstring has the help of its options; an option that is False by default is a
    switch.

    Args:
        target: `MODULE.FUNCTION` of this package, to call instead with the same arguments.
        name: Unset: the function's name, without that of the group.
        has_json: Whether to add --json; a function may take it as `as_json`.
    """

    def declare(declared: Callable[..., CommandResult | None]) -> Callable[..., None]:
        signature = inspect.signature(declared, eval_str=True)
        summary, _, args = (inspect.getdoc(declared) or "").partition("\n\nArgs:\n")
        helps = dict(_HELP.findall(args))
        takes_json = "as_json" in signature.parameters
        of_group = group.info.name or ""
        own = name or declared.__name__.removeprefix(f"{of_group}_").replace("_", "-")
        is_group = own == of_group
        label = own if is_group else f"{of_group} {own}".strip()

        @functools.wraps(declared)
        def run(context: Context, *, as_json: bool = False, **options: Any) -> None:
            if is_group and context.invoked_subcommand:
                return
            options |= {"as_json": as_json} if takes_json else {}

            def call() -> CommandResult:
                function: Callable[..., Any] = declared
                if target:
                    module, _, attribute = target.partition(".")
                    function = getattr(import_module(f"supervisor.cli.{module}"), attribute)
                result: CommandResult = function(**options)
                return result

            raise typer.Exit(run_command(label, call, as_json=as_json and has_json))

        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter("context", keyword, annotation=Context)]
        if has_json and not takes_json:
            added.append(inspect.Parameter("as_json", keyword, default=False, annotation=Json))
        parameters = [
            *(_with_help(given, helps.get(name)) for name, given in signature.parameters.items()),
            *added,
        ]
        run.__doc__ = summary
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        (group.callback() if is_group else group.command(own))(run)
        return run

    return declare


def names_of(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    return tuple(name for part in text.split(",") if (name := part.strip()))
