"""Declares the commands of requests, captures, reports, slots, batches, usage and records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from typer import Argument, BadParameter, Option, Typer

from supervisor.cli.options import (
    Config,
    Everywhere,
    Json,
    Names,
    read_bytes,
    read_flag,
    read_seconds,
    verb,
    word,
)
from supervisor.output import CommandResult

# The same as `proxy.observe.past.LIMIT_MAX`, which is slow to import.
_LAST_MAX: Final = 10_000

requests_commands = Typer(
    name="requests", help="Requests in flight, and ended requests.", invoke_without_command=True
)

RequestId = Annotated[str, word("request", help="From `corral requests`.", metavar="ID")]


@verb(requests_commands)
def requests(
    last: Annotated[int | None, Option("--last", "-n", min=1, max=_LAST_MAX)] = None,
    model: Annotated[str | None, word("model", "--model", "-m")] = None,
    client: str | None = None,
    failed: bool = False,
    since: str | None = None,
    everywhere: Everywhere = False,
) -> CommandResult:
    """List the requests in flight; with any of the first options, the latest 20 that have ended.

    Args:
        last: The latest N ended requests.
        model: Ended requests of this model.
        client: Ended requests of this API key or address.
        failed: Requests that failed or were cancelled.
        since: Ended since then: 90s, 15m, 1h, 2d, or a date.
    """
    from proxy.observe.past import HistoryQuery

    if everywhere:
        from supervisor.cli.all_machines import list_past, list_requests
    else:
        from supervisor.cli.requests import list_past, list_requests
    if not failed and all(value is None for value in (last, model, client, since)):
        return list_requests()
    query = HistoryQuery(limit=last or 20, model=model, client=client, is_failed=failed)
    return list_past(query, since)


@verb(requests_commands, "requests.show")
def requests_show(request_id: Annotated[str, word("any request", metavar="ID")]) -> None:
    """Show every figure of a request, and where its time went.

    Args:
        request_id: From `corral requests`, or from X-Request-Id.
    """


@verb(requests_commands, "requests.forget")
def requests_forget(
    model: Annotated[str | None, word("model", "--model", "-m")] = None,
    everything: Annotated[bool, Option("--all")] = False,
) -> None:
    """Delete the records of ended requests.

    Args:
        model: The model.
        everything: All models.
    """


@verb(requests_commands, "requests.cancel")
def requests_cancel(request_id: RequestId) -> None:
    """End a request with an error, in any phase."""


capture_commands = Typer()


@verb(capture_commands)
def capture(
    model: Annotated[str | None, word("model", "--model")] = None,
    duration_s: Annotated[float, Option("--for", parser=read_seconds, metavar="TIME")] = "10m",  # type: ignore[assignment]
    output: Annotated[Path | None, Option(metavar="FILE")] = None,
    max_size: Annotated[int, Option(parser=read_bytes, metavar="SIZE")] = "64MiB",  # type: ignore[assignment]
    max_requests: Annotated[int | None, Option(min=1)] = None,
    stop: bool = False,
) -> CommandResult:
    """Record the requests to a model and their responses.

    Without options: show the running capture.

    The file contains prompts and answers, readable by you alone (mode 0600), and no keys. The
    capture ends with this command (Ctrl-C), at the first of its limits, or with the daemon; `corral
    replay` sends the requests again.

    Args:
        model: The model to capture.
        duration_s: Such as 90s, 10m or 2h.
        output: A new file. Unset: named after the model and the time.
        max_size: Limit of the file, such as 64MiB.
        max_requests: Limit of requests.
        stop: End the running capture.
    """
    from supervisor.cli import capture as command
    from supervisor.experiments.capture_lines import (
        DURATION_MAX_S,
        SIZE_MAX_BYTES,
        SIZE_MIN_BYTES,
        CaptureLimits,
    )

    if not 0 < duration_s <= DURATION_MAX_S:
        raise BadParameter("--for is above 0s and at most 24h")
    if not SIZE_MIN_BYTES <= max_size <= SIZE_MAX_BYTES:
        raise BadParameter("--max-size is from 64KiB to 64GiB")
    if stop and model:
        raise BadParameter("give --model or --stop, not both")
    if output and not model:
        raise BadParameter("--output needs --model")
    if stop:
        return command.stop()
    if model is None:
        return command.show()
    return command.capture(model, CaptureLimits(duration_s, max_size, max_requests), output)


@verb(capture_commands)
def replay(  # noqa: PLR0913, PLR0917 (a command has its options)
    capture_file: Annotated[Path, Argument(metavar="CAPTURE")],
    engine: Annotated[str | None, word("engine", "--engine")] = None,
    profile: Annotated[str | None, word("profile", "--profile")] = None,
    changes: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE")] = None,
    daemon: bool = False,
    speed: Literal["full", "as-recorded"] = "full",
    concurrency: Annotated[int | None, Option(min=1, max=64)] = None,
    model: Annotated[str | None, word("model", "--model")] = None,
    config: Config = None,
) -> CommandResult:
    """Replay a capture with other settings or another build.

    It starts a separate engine, and samples greedily, with one seed. It shows speed, cache use, and
    the first token that differs in each answer. Answers are compared with the captured answers if
    those were sampled greedily; otherwise the capture is first replayed with the model's present
    settings. A running daemon is only affected by the load on the processor.

    Args:
        capture_file: A file of `capture`.
        engine: Another build, or a path.
        profile: Another profile.
        changes: A flag, such as cache-type-k=q8_0.
        daemon: Send the requests to the running daemon.
        speed: full: as fast as possible. as-recorded: at the recorded times.
        concurrency: Requests at once. Unset: as captured.
        model: Unset: the model of the capture.
    """
    from supervisor.cli.capture import ReplayOptions
    from supervisor.cli.capture import replay as call

    if daemon and (engine or profile or changes):
        raise BadParameter("--daemon plays with the daemon's settings; leave the others out")
    flags = dict(map(read_flag, changes or ()))
    options = ReplayOptions(
        model, engine, profile, flags, daemon, speed == "as-recorded", concurrency, config
    )
    return call(capture_file, options)


@verb(capture_commands, "report.report")
def report(
    output: Annotated[Path | None, Option(metavar="FILE")] = None,
    with_prompts: bool = False,
    config: Config = None,
) -> None:
    """Write one archive for a bug report.

    It contains versions, checks, plans, settings, logs and figures.

    It contains no keys, no prompts and no answers, and neither your name nor your home directory.
    Works without a daemon, and with invalid settings.

    Args:
        output: A new file. Unset: in this directory, named after the time.
        with_prompts: Keep the prompts in logs and settings.
    """


slots_commands = Typer(
    name="slots",
    help="Where prompts are kept: in slots, in memory, on disk.",
    invoke_without_command=True,
)


@verb(slots_commands, "status.show_tiers")
def slots(everywhere: Everywhere = False) -> None:
    """Show where the prompts of each model are kept, and how much computation that saved."""


@verb(slots_commands, "slots.list_slots")
def slots_list() -> None:
    """List the saved conversations."""


@verb(slots_commands, "slots.save")
def slots_save(models: Names) -> None:
    """Save the idle slots of running models now."""


@verb(slots_commands, "slots.forget")
def slots_forget(
    model: Annotated[str | None, word("model")] = None,
    everything: Annotated[bool, Option("--all")] = False,
    conversation: Annotated[str | None, Option("--conversation", "-c", metavar="NAME")] = None,
    request: Annotated[str | None, Option(metavar="ID")] = None,
) -> None:
    """Delete saved conversations and learned prompts.

    Works without a daemon, except with --request.

    Args:
        model: The model.
        everything: All models.
        conversation: From `corral slots list`.
        request: The conversation of a request of `corral requests`.
    """


@verb(slots_commands, "key.new")
def slots_new_key(file: Annotated[Path | None, Argument()] = None, config: Config = None) -> None:
    """Create a key that encrypts saved conversations.

    If the file has keys already, the new key is added.

    Args:
        file: Unset: the file in the settings, or slots.key beside them.
    """


batch_commands = Typer(
    name="batch", help="Files of requests, computed as batches.", no_args_is_help=True
)

BatchId = Annotated[str, Argument(metavar="BATCH")]
Output = Annotated[
    Path | None,
    Option(metavar="FILE.jsonl", help="Write the results to this file, and errors beside it."),
]


@verb(batch_commands, "batch.run")
def batch_run(file: Annotated[Path, Argument(metavar="FILE.jsonl")], output: Output = None) -> None:
    """Compute a file of requests in OpenAI's batch format.

    The results are written beside the file.

    Exits with 1 if a line failed. After Ctrl-C the batch continues; a second Ctrl-C cancels it. If
    the daemon needs an API key, it is read from CORRAL_API_KEY.

    Args:
        file: Requests, one a line.
    """


@verb(batch_commands, "batch.list_batches")
def batch_list() -> None:
    """List the newest batches."""


@verb(batch_commands, "batch.show")
def batch_show(batch_id: BatchId, output: Output = None) -> None:
    """Show the progress of a batch, and the errors of its lines."""


@verb(batch_commands, "batch.cancel")
def batch_cancel(batch_id: BatchId) -> None:
    """Cancel a batch; its results so far are kept."""


usage_commands = Typer()


@verb(usage_commands)
def usage(  # noqa: PLR0913, PLR0917 (a command has its options)
    by: Literal["key", "model", "day", "month"] | None = None,
    since: Annotated[str | None, Option(metavar="DAY")] = None,
    key: Annotated[str | None, word("key", "--key")] = None,
    model: Annotated[str | None, word("model", "--model")] = None,
    internal: Annotated[bool, Option("--internal")] = False,
    as_csv: Annotated[bool, Option("--csv")] = False,
    everywhere: Everywhere = False,
    as_json: Json = False,
) -> CommandResult:
    """Show the tokens and the time that each API key used.

    Works without a daemon. CACHED tokens were taken from a cache instead of being computed.

    Args:
        by: How to group the lines. Unset: by key and model.
        since: 2026-11-22, 2026-11, or 7d. Unset: all.
        key: Only this API key.
        model: Only this model.
        internal: Show the kinds of internal work, such as warming. Unset: as one line.
        as_csv: Print comma-separated values.
    """
    if as_csv and as_json:
        raise BadParameter("--csv and --json exclude each other")
    from supervisor.cli.history import usage as call
    from supervisor.records.usage import BY_DEFAULT, Query

    query = Query((by,) if by else BY_DEFAULT, since, key, model)
    return call(query, as_csv=as_csv, internal=internal, everywhere=everywhere)


record_commands = Typer(
    name="record", help="Sizes and pauses of requests on disk.", no_args_is_help=True
)


@verb(record_commands, "history.show_recorded")
def record_show() -> None:
    """Show how many requests of each model are recorded."""


@verb(record_commands, "history.forget_recorded")
def record_forget(
    model: Annotated[str | None, word("model")] = None,
    everything: Annotated[bool, Option("--all")] = False,
) -> None:
    """Delete the recorded figures; works without a daemon.

    Args:
        model: The model.
        everything: All models.
    """
