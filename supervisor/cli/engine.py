"""`corral engine`: llama-server binaries."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from supervisor.cli.options import Config, Json, finish, offer
from supervisor.cli.quantities import read_seconds
from supervisor.output import CommandResult

Build = Annotated[
    str,
    typer.Argument(
        metavar="BUILD",
        help="Such as b10434 or b10434-vulkan.",
        autocompletion=offer("engine"),
    ),
]
Wanted = Annotated[
    str,
    typer.Argument(
        metavar="BUILD",
        help="A build such as b11434, a version such as v0.5.0, stable (the latest version), or "
        "newest (the newest build).",
    ),
]

# As the daemon allows.
_LIMIT_MAX_S: Final = 31 * 86_400


def _share(text: str) -> float:
    """Read a share such as `10%` or `0.1`; raises BadParameter."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no share; write 10% or 0.1") from error


commands = typer.Typer(help="llama-server binaries on this machine.", no_args_is_help=True)


@commands.command("list")
def engine_list(config: Config = None, as_json: Json = False) -> None:
    """List all llama-server builds found; the first is the one in use."""
    from supervisor.commands.engine import list_engines as call

    finish("engine list", lambda: call(config), as_json=as_json)


@commands.command("path")
def engine_path(config: Config = None, as_json: Json = False) -> None:
    """Print the path of the llama-server in use."""
    from supervisor.commands.engine import path as call

    finish("engine path", lambda: call(config), as_json=as_json)


@commands.command("help")
def engine_help(
    flag: Annotated[str | None, typer.Argument(help="One flag; none means all.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the options of the llama-server in use, read from its --help."""
    from supervisor.commands.engine import show_help as call

    finish("engine help", lambda: call(flag, config), as_json=as_json)


@commands.command("install")
def engine_install(
    wanted: Wanted = "stable",
    variant: Annotated[
        Literal["cpu", "vulkan", "cuda", "rocm", "metal"] | None,
        typer.Option("--variant", help="What it computes on; unset: what suits this machine."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Install a release of llama.cpp, beside those that are here."""
    from supervisor.commands.engine_install import install as call

    finish("engine install", lambda: call(wanted, variant, config), as_json=as_json)


@commands.command("update")
def engine_update(wanted: Wanted = "stable", config: Config = None, as_json: Json = False) -> None:
    """Install the newest release and use it; `rollback` goes back to the one before."""
    from supervisor.commands.engine_install import update as call

    finish("engine update", lambda: call(wanted, config), as_json=as_json)


@commands.command("use")
def engine_use(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Use an installed build, from each model's next start; `corral reload` replaces what runs."""
    from supervisor.commands.engine_use import use as call

    finish("engine use", lambda: call(name, config), as_json=as_json)


@commands.command("rollback")
def engine_rollback(config: Config = None, as_json: Json = False) -> None:
    """Use the build that was in use before; each further rollback goes one more back."""
    from supervisor.commands.engine_use import rollback as call

    finish("engine rollback", lambda: call(config), as_json=as_json)


@commands.command("remove")
def engine_remove(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Remove an installed build that nothing uses."""
    from supervisor.commands.engine_use import remove as call

    finish("engine remove", lambda: call(name, config), as_json=as_json)


@commands.command("canary")
def engine_canary(  # noqa: PLR0913, PLR0917 (a command has its options)
    build: Annotated[
        str | None,
        typer.Argument(
            help="An installed build, or the path of a llama-server.",
            autocompletion=offer("engine"),
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A loaded model; the only one by default.")
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            parser=_share, metavar="SHARE", help="Of new conversations, such as 10% or 0.1."
        ),
    ] = "10%",  # type: ignore[assignment]
    limit_s: Annotated[
        float | None,
        typer.Option(
            "--for", parser=read_seconds, metavar="TIME", help="Decide after 90s, 10m or 2h."
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(parser=_share, metavar="SHARE", help="How much slower it may be."),
    ] = "20%",  # type: ignore[assignment]
    promote: Annotated[
        bool, typer.Option("--promote", help="Make it the model's own engine.")
    ] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="End it.")] = False,
    as_json: Json = False,
) -> None:
    """Try another build on a share of a model's conversations; without words, show how it does.

    One replica of the model runs it. A crash, more errors, or less speed than the margin allows
    withdraw it; at the end of --for it is promoted where the figures exclude all that: every
    replica moves to it, and corral.toml keeps it. No answer is cut.
    """
    from supervisor.commands import canary as command

    if sum((build is not None, promote, withdraw)) > 1:
        raise typer.BadParameter("give a build, --promote or --withdraw, not two of them")
    if not 0 < share < 1:
        raise typer.BadParameter("--share is above 0% and below 100%")
    if limit_s is not None and not 0 < limit_s <= _LIMIT_MAX_S:
        raise typer.BadParameter("--for is above 0s and at most 31d")
    if not 0 <= margin <= 1:
        raise typer.BadParameter("--margin is from 0% to 100%")
    options = command.CanaryOptions(share, limit_s, margin)

    def call() -> CommandResult:
        if promote or withdraw:
            return command.end(model, is_promoted=promote)
        return command.start(build, model, options) if build else command.show()

    finish("engine canary", call, as_json=as_json)
