"""`corral capture`, `replay`, `report`: what was asked and answered, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, finish, offer
from supervisor.cli.quantities import read_bytes, read_flag, read_seconds
from supervisor.output import CommandResult

commands = typer.Typer()


@commands.command()
def capture(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[
        str | None,
        typer.Option("--model", help="Whose requests.", autocompletion=offer("model")),
    ] = None,
    duration_s: Annotated[
        float,
        typer.Option("--for", parser=read_seconds, metavar="TIME", help="Such as 90s, 10m or 2h."),
    ] = "10m",  # type: ignore[assignment]
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file. Unset: named after the model and the time."),
    ] = None,
    max_size: Annotated[
        int, typer.Option(parser=read_bytes, metavar="SIZE", help="Of the file, such as 64MiB.")
    ] = "64MiB",  # type: ignore[assignment]
    max_requests: Annotated[int | None, typer.Option(min=1, help="As many requests.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the capture that runs.")] = False,
    as_json: Json = False,
) -> None:
    """Record the requests to a model with their responses; without words, show what is recorded.

    The file has prompts and answers, for you alone (mode 0600), and no keys. The capture ends with
    this command (Ctrl-C), at the first of its limits, or with the daemon. `corral replay` plays it.
    """
    from supervisor.capture.limits import DURATION_MAX_S, SIZE_MAX_BYTES, SIZE_MIN_BYTES
    from supervisor.commands import capture as command

    if not 0 < duration_s <= DURATION_MAX_S:
        raise typer.BadParameter("--for is above 0s and at most 24h")
    if not SIZE_MIN_BYTES <= max_size <= SIZE_MAX_BYTES:
        raise typer.BadParameter("--max-size is from 64KiB to 64GiB")
    if stop and model:
        raise typer.BadParameter("give --model or --stop, not both")
    if output and not model:
        raise typer.BadParameter("--output needs --model")

    def call() -> CommandResult:
        if stop:
            return command.stop()
        if model is None:
            return command.show()
        options = command.CaptureOptions(model, duration_s, max_size, max_requests, output)
        return command.capture(options)

    finish("capture", call, as_json=as_json)


@commands.command()
def replay(  # noqa: PLR0913, PLR0917 (a command has its options)
    capture_file: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A file of `capture`.")],
    engine: Annotated[
        str | None,
        typer.Option(help="Another build, or a path.", autocompletion=offer("engine")),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Another profile.", autocompletion=offer("profile"))
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A flag, such as cache-type-k=q8_0."),
    ] = None,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Play against the running daemon.")
    ] = False,
    speed: Annotated[
        Literal["full", "as-recorded"],
        typer.Option(help="As fast as answers come, or not before the time of each request."),
    ] = "full",
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=64, help="Unset: as many as were in flight.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Unset: the model of the capture.", autocompletion=offer("model")),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Play the requests of a capture with other settings or another build, on an engine of its own.

    Greedy, with one seed. Shows speed, cache use, and the first token of each answer that differs
    from the captured one where that was greedy, else from that of the model's present settings,
    which are played first. A running daemon is not disturbed, but for the processor.
    """
    from supervisor.commands.replay import ReplayOptions
    from supervisor.commands.replay import replay as call

    if daemon and (engine or profile or changes):
        raise typer.BadParameter("--daemon plays with the daemon's settings; leave the others out")
    flags = dict(map(read_flag, changes or ()))
    is_as_recorded = speed == "as-recorded"
    options = ReplayOptions(
        model, engine, profile, flags, daemon, is_as_recorded, concurrency, config
    )
    finish("replay", lambda: call(capture_file, options), as_json=as_json)


@commands.command()
def report(
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file. Unset: named after the time, in here."),
    ] = None,
    with_prompts: Annotated[
        bool, typer.Option("--with-prompts", help="Keep what logs and settings have of prompts.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Write one archive for a bug report: versions, checks, plans, settings, logs and figures.

    It has no keys, no prompts and no answers, and neither your name nor your home directory. Works
    without a daemon, and with settings that are wrong.
    """
    from supervisor.commands.report import report as call

    finish("report", lambda: call(config, output, with_prompts=with_prompts), as_json=as_json)
