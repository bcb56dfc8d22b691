"""Declares the commands of checks, plans, measurements, usage and records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import BadParameter, Option, Typer

from supervisor.cli.options import Config, Json, ModelName, flag, names_of, verb, word
from supervisor.output import CommandResult

measure_commands = Typer()


@verb(measure_commands)
def doctor(config: Config = None) -> CommandResult:
    """Check everything that serving needs, with a fix for each problem.

    Exits with 1 if something will not work. The report contains no secrets and no user name.
    """
    from supervisor.cli.report import doctor as call

    return call(config)


@verb(measure_commands)
def plan(model: ModelName, config: Config = None) -> CommandResult:
    """Show the exact llama-server command for a model, and the origin of each flag."""
    from supervisor.cli.plan import plan as call

    return call(model, config)


@verb(measure_commands)
def explain(
    request_id: Annotated[
        str | None,
        word("any request", "From `corral requests --last 20`. Unset: the latest.", metavar="ID"),
    ] = None,
) -> CommandResult:
    """Show why a request took so long, and why its prompt was not in the cache."""
    from supervisor.cli.history import explain_request as call

    return call(request_id)


@verb(measure_commands)
def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, word("model", "A name from corral.toml, or a GGUF.")],
    profiles: Annotated[
        str,
        Option(help="Profiles to compare, with commas; `plain` is llama-server's own defaults."),
    ] = "",
    workload: Annotated[
        str,
        Option(
            help="What to measure, with commas: chat, long-prompt, generation, concurrent, batch, "
            "embedding, yours. Unset: all that suit the model."
        ),
    ] = "",
    repeats: Annotated[int | None, Option(min=1, max=1000, help="Rounds. Unset: 5.")] = None,
    minutes: Annotated[
        float | None, Option(min=0.1, max=10_000, help="As many rounds as fit in this time.")
    ] = None,
    seed: Annotated[
        int | None, Option(min=0, help="Repeat the texts and the order of an earlier run.")
    ] = None,
    force: Annotated[bool, flag("--force", "Measure although the machine is not free.")] = False,
    report: Annotated[
        Path | None, Option(metavar="FILE.html", help="Write a report with plots there.")
    ] = None,
    config: Config = None,
) -> CommandResult:
    """Measure a model under several profiles, side by side, on engines of its own.

    Without --profiles: llama-server's own defaults against the model's profile. Each round starts
    every variant once, in another order. A running daemon is not disturbed. Ctrl-C keeps the
    results so far (exit code 130).
    """
    from supervisor.cli.bench import BenchOptions
    from supervisor.cli.bench import bench as call

    options = BenchOptions(
        names_of(profiles), names_of(workload), repeats, minutes, seed, force, report
    )
    return call(model, config, options)


@verb(measure_commands)
def trial(
    model: Annotated[str | None, word("model", "A model with a trial; none means all.")] = None,
    apply: Annotated[bool, flag("--apply", "Make the profile on trial the model's own.")] = False,
    end: Annotated[bool, flag("--end", "End the trial.")] = False,
) -> CommandResult:
    """Show the figures of a live trial of another profile; --apply or --end finishes the trial.

    Both change corral.toml, keep its comments, write a backup beside it, and reload. No answer is
    cut.
    """
    from supervisor.cli.trial import finish, show

    if apply and end:
        raise BadParameter("give --apply or --end, not both")
    return finish(model, is_applied=apply) if apply or end else show(model)


@verb(measure_commands)
def balance(
    model: Annotated[str | None, word("model", "A model with workers; none means all.")] = None,
    apply: Annotated[
        bool, flag("--apply", "Move the layers as suggested; loads the model again.")
    ] = False,
    undo: Annotated[
        bool, flag("--undo", "Move the layers back to their previous workers.")
    ] = False,
) -> CommandResult:
    """Show how long each worker of a split model takes, and which layers should move.

    --apply stores the new split in a file of the daemon. Requests wait while the model loads.
    """
    from supervisor.cli import start

    if apply and undo:
        raise BadParameter("give --apply or --undo, not both")
    call = start.apply if apply else start.undo if undo else start.show
    return call(model)


@verb(measure_commands)
def tune(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, word("model", "From corral.toml, fetched, or a GGUF file.")],
    goal: Annotated[
        Literal["latency", "throughput", "memory"],
        Option(help="What to improve: one answer, all streams together, or peak memory."),
    ] = "latency",
    minutes: Annotated[float, Option(min=0.2, max=1440, help="Time to search.")] = 5.0,
    seed: Annotated[int, Option(min=0, max=2**31, help="Seed for the order of measurements.")] = 0,
    undo: Annotated[bool, flag("--undo", "Restore the profile before the last tuning.")] = False,
    force: Annotated[bool, flag("--force", "Measure although the machine is not free.")] = False,
    config: Config = None,
) -> CommandResult:
    """Search for the flags with which a model runs best on this machine.

    Measures variants of its profile on engines of its own, beside the daemon. The best one is
    written to profiles.d/MODEL.toml if it is really faster and its answers are as good.
    """
    from supervisor.cli import tune as command

    if undo:
        return command.undo(model)
    return command.tune(model, config, goal, minutes, seed, force=force)


usage_commands = Typer()


@verb(usage_commands)
def usage(
    by: Annotated[
        Literal["key", "model", "day", "month"] | None,
        Option(help="How to group the lines. Unset: by key and model."),
    ] = None,
    since: Annotated[
        str | None, Option(metavar="DAY", help="2026-11-22, 2026-11, or 7d. Unset: all.")
    ] = None,
    key: Annotated[str | None, word("key", "Only this API key.", "--key")] = None,
    model: Annotated[str | None, word("model", "Only this model.", "--model")] = None,
    as_csv: Annotated[bool, flag("--csv", "Print comma-separated values.")] = False,
    as_json: Json = False,
) -> CommandResult:
    """Show the tokens, slot time and processor time that each API key used.

    Works without a daemon. CACHED tokens were taken from a cache instead of being computed.
    """
    if as_csv and as_json:
        raise BadParameter("--csv and --json exclude each other")
    from supervisor.cli.history import usage as call
    from supervisor.records.usage import Query

    return call(Query(by, since, key, model), as_csv=as_csv)


record_commands = Typer(
    name="record", help="Sizes and pauses of requests on disk.", no_args_is_help=True
)


@verb(record_commands, "show")
def record_show() -> CommandResult:
    """Show how many requests of each model are recorded: figures only, no text."""
    from supervisor.cli.history import show_recorded as call

    return call()


@verb(record_commands, "forget")
def record_forget(
    model: Annotated[str | None, word("model", "The model.")] = None,
    everything: Annotated[bool, flag("--all", "All models.")] = False,
) -> CommandResult:
    """Delete the recorded figures; works without a daemon."""
    from supervisor.cli.history import forget_recorded as call

    return call(model, everything=everything)
