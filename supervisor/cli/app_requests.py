"""Declares the commands of requests, captures, reports, slots and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from supervisor.cli.options import (
    Config,
    Json,
    Names,
    finish,
    offer,
    read_bytes,
    read_flag,
    read_seconds,
)
from supervisor.output import CommandResult

# The same as `proxy.observe.past.LIMIT_MAX`, which is slow to import.
_LAST_MAX: Final = 10_000

requests_commands = typer.Typer(
    help="Requests in flight, and ended requests.", invoke_without_command=True
)

RequestId = Annotated[
    str,
    typer.Argument(metavar="ID", help="From `corral requests`.", autocompletion=offer("request")),
]


@requests_commands.callback()
def requests(  # noqa: PLR0913, PLR0917 (one for each option)
    context: typer.Context,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, max=_LAST_MAX, help="The latest N ended requests."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Ended requests of this model.", autocompletion=offer("model")
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Ended requests of this API key or address.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Requests that failed or were cancelled.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Ended since then: 90s, 15m, 1h, 2d, or a date."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the requests in flight; with any of these options, the latest 20 that have ended."""
    if context.invoked_subcommand is not None:
        return
    from supervisor.cli.requests import PastFilter, list_past, list_requests

    chosen = PastFilter(last, model, client, failed, since)
    call = (lambda: list_past(chosen)) if chosen.is_any else list_requests
    finish("requests", call, as_json=as_json)


@requests_commands.command("show")
def requests_show(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="From `corral requests`, or from X-Request-Id.",
            autocompletion=offer("any request"),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show every figure of a request, and where its time went."""
    from supervisor.cli.requests import show as call

    finish("requests show", lambda: call(request_id), as_json=as_json)


@requests_commands.command("forget")
def requests_forget(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model.", autocompletion=offer("model")),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the stored records of ended requests; works without a daemon."""
    from supervisor.cli.requests import forget as call

    finish("requests forget", lambda: call(model, everything=everything), as_json=as_json)


@requests_commands.command("cancel")
def requests_cancel(request_id: RequestId, as_json: Json = False) -> None:
    """End a request with an error, in any phase."""
    from supervisor.cli.requests import cancel as call

    finish("requests cancel", lambda: call(request_id), as_json=as_json)


capture_commands = typer.Typer()


@capture_commands.command()
def capture(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model to capture.", autocompletion=offer("model")),
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
        int,
        typer.Option(parser=read_bytes, metavar="SIZE", help="Limit of the file, such as 64MiB."),
    ] = "64MiB",  # type: ignore[assignment]
    max_requests: Annotated[int | None, typer.Option(min=1, help="Limit of requests.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the running capture.")] = False,
    as_json: Json = False,
) -> None:
    """Record the requests to a model and their responses; without options, show the capture.

    The file has prompts and answers, for you alone (mode 0600), and no keys. The capture ends with
    this command (Ctrl-C), at the first of its limits, or with the daemon. `corral replay` plays it.
    """
    from supervisor.cli import capture as command
    from supervisor.experiments.capture_lines import (
        DURATION_MAX_S,
        SIZE_MAX_BYTES,
        SIZE_MIN_BYTES,
        CaptureLimits,
    )

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
        limits = CaptureLimits(duration_s, max_size, max_requests)
        return command.capture(model, limits, output)

    finish("capture", call, as_json=as_json)


@capture_commands.command()
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
        typer.Option(help="full: as fast as possible. as-recorded: at the recorded times."),
    ] = "full",
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=64, help="Requests at once. Unset: as captured.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Unset: the model of the capture.", autocompletion=offer("model")),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Play the requests of a capture with other settings or another build, on an engine of its own.

    Greedy, with one seed. Shows speed, cache use, and the first token that differs in each answer.
    Answers are compared with the captured ones if those were greedy; otherwise the model's present
    settings are played first. A running daemon is not disturbed, except for the processor.
    """
    from supervisor.cli.replay import ReplayOptions
    from supervisor.cli.replay import replay as call

    if daemon and (engine or profile or changes):
        raise typer.BadParameter("--daemon plays with the daemon's settings; leave the others out")
    flags = dict(map(read_flag, changes or ()))
    is_as_recorded = speed == "as-recorded"
    options = ReplayOptions(
        model, engine, profile, flags, daemon, is_as_recorded, concurrency, config
    )
    finish("replay", lambda: call(capture_file, options), as_json=as_json)


@capture_commands.command()
def report(
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file. Unset: named after the time, in here."),
    ] = None,
    with_prompts: Annotated[
        bool, typer.Option("--with-prompts", help="Keep the prompts in logs and settings.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Write one archive for a bug report: versions, checks, plans, settings, logs and figures.

    It has no keys, no prompts and no answers, and neither your name nor your home directory. Works
    without a daemon, and with invalid settings.
    """
    from supervisor.cli.report import report as call

    finish("report", lambda: call(config, output, with_prompts=with_prompts), as_json=as_json)


slots_commands = typer.Typer(
    help="Where prompts are kept: in slots, in memory, on disk.", invoke_without_command=True
)


@slots_commands.callback()
def slots(context: typer.Context, as_json: Json = False) -> None:
    """Show where the prompts of each model are kept, and how much computation that saved."""
    if context.invoked_subcommand is not None:
        return
    from supervisor.cli.status import show_tiers as call

    finish("slots", call, as_json=as_json)


@slots_commands.command("list")
def slots_list(as_json: Json = False) -> None:
    """List the saved conversations."""
    from supervisor.cli.slots import list_slots as call

    finish("slots list", call, as_json=as_json)


@slots_commands.command("save")
def slots_save(models: Names = None, as_json: Json = False) -> None:
    """Save the idle slots of running models now."""
    from supervisor.cli.slots import save as call

    finish("slots save", lambda: call(models or []), as_json=as_json)


@slots_commands.command("forget")
def slots_forget(
    model: Annotated[
        str | None, typer.Argument(help="The model.", autocompletion=offer("model"))
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    conversation: Annotated[
        str | None,
        typer.Option("--conversation", "-c", metavar="NAME", help="From `corral slots list`."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request", metavar="ID", help="The conversation of a request of `corral requests`."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete saved conversations and learned prompts, or one conversation everywhere.

    Works without a daemon, except with --request.
    """
    from supervisor.cli.slots import forget as call

    asked = {"model": model, "conversation": conversation, "request": request}
    finish("slots forget", lambda: call(**asked, everything=everything), as_json=as_json)


@slots_commands.command("new-key")
def slots_new_key(
    file: Annotated[
        Path | None,
        typer.Argument(help="Unset: the file in the settings, or slots.key beside them."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Create a key that encrypts saved conversations; added to a file that has keys already."""
    from supervisor.cli.key import new as call

    finish("slots new-key", lambda: call(file, config), as_json=as_json)


batch_commands = typer.Typer(help="Files of requests, computed as batches.", no_args_is_help=True)

Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Write the results there, and errors beside it."),
]


@batch_commands.command("run")
def batch_run(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Requests, one a line.")],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compute a file of requests in OpenAI's batch format, and write the results beside it.

    Exits with 1 if a line failed. After Ctrl-C the batch continues; a second Ctrl-C cancels it. If
    the daemon needs an API key, it is read from CORRAL_API_KEY.
    """
    from supervisor.cli.batch import run as call

    finish("batch run", lambda: call(file, output), as_json=as_json)


@batch_commands.command("list")
def batch_list(as_json: Json = False) -> None:
    """List the newest batches."""
    from supervisor.cli.batch import list_batches as call

    finish("batch list", call, as_json=as_json)


@batch_commands.command("show")
def batch_show(batch: str, output: Output = None, as_json: Json = False) -> None:
    """Show the progress of a batch, and the errors of its lines."""
    from supervisor.cli.batch import show as call

    finish("batch show", lambda: call(batch, output), as_json=as_json)


@batch_commands.command("cancel")
def batch_cancel(batch: str, as_json: Json = False) -> None:
    """Cancel a batch; its results so far are kept."""
    from supervisor.cli.batch import cancel as call

    finish("batch cancel", lambda: call(batch), as_json=as_json)
