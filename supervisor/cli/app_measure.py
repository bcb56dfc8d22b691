"""Declares the commands of checks, plans, measurements, usage and records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, ModelName, finish, names_of, offer
from supervisor.output import CommandResult

measure_commands = typer.Typer()


@measure_commands.command()
def doctor(config: Config = None, as_json: Json = False) -> None:
    """Check everything that serving needs, with a fix for each problem.

    Exits with 1 if something will not work. The report contains no secrets and no user name.
    """
    from supervisor.cli.report import doctor as call

    finish("doctor", lambda: call(config), as_json=as_json)


@measure_commands.command()
def plan(model: ModelName, config: Config = None, as_json: Json = False) -> None:
    """Show the exact llama-server command for a model, and the origin of each flag."""
    from supervisor.cli.plan import plan as call

    finish("plan", lambda: call(model, config), as_json=as_json)


@measure_commands.command()
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="From `corral requests --last 20`. Unset: the latest.",
            autocompletion=offer("any request"),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show why a request took so long, and why its prompt was not in the cache."""
    from supervisor.cli.history import explain_request as call

    finish("explain", lambda: call(request_id), as_json=as_json)


@measure_commands.command()
def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[
        str,
        typer.Argument(help="A name from corral.toml, or a GGUF.", autocompletion=offer("model")),
    ],
    profiles: Annotated[
        str,
        typer.Option(
            help="Profiles to compare, with commas; `plain` is llama-server's own defaults."
        ),
    ] = "",
    workload: Annotated[
        str,
        typer.Option(
            help="What to measure, with commas: chat, long-prompt, generation, concurrent, batch, "
            "embedding, yours. Unset: all that suit the model."
        ),
    ] = "",
    repeats: Annotated[int | None, typer.Option(min=1, max=1000, help="Rounds. Unset: 5.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, max=10_000, help="As many rounds as fit in this time.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeat the texts and the order of an earlier run.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Measure although the machine is not free.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a report with plots there.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
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
    finish("bench", lambda: call(model, config, options), as_json=as_json)


@measure_commands.command()
def trial(
    model: Annotated[
        str | None,
        typer.Argument(help="A model with a trial; none means all.", autocompletion=offer("model")),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Make the profile on trial the model's own.")
    ] = False,
    end: Annotated[bool, typer.Option("--end", help="End the trial.")] = False,
    as_json: Json = False,
) -> None:
    """Show the figures of a live trial of another profile; --apply or --end finishes the trial.

    Both change corral.toml, keep its comments, write a backup beside it, and reload. No answer is
    cut.
    """
    from supervisor.cli.trial import finish as finish_trial
    from supervisor.cli.trial import show

    if apply and end:
        raise typer.BadParameter("give --apply or --end, not both")

    def call() -> CommandResult:
        return finish_trial(model, is_applied=apply) if apply or end else show(model)

    finish("trial", call, as_json=as_json)


@measure_commands.command()
def balance(
    model: Annotated[
        str | None,
        typer.Argument(help="A model with workers; none means all.", autocompletion=offer("model")),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Move the layers as suggested; loads the model again.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Move the layers back to their previous workers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how long each worker of a split model takes, and which layers should move.

    --apply stores the new split in a file of the daemon. Requests wait while the model loads.
    """
    from supervisor.cli import start

    if apply and undo:
        raise typer.BadParameter("give --apply or --undo, not both")
    call = start.apply if apply else start.undo if undo else start.show
    finish("balance", lambda: call(model), as_json=as_json)


@measure_commands.command()
def tune(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[
        str,
        typer.Argument(
            help="From corral.toml, fetched, or a GGUF file.", autocompletion=offer("model")
        ),
    ],
    goal: Annotated[
        Literal["latency", "throughput", "memory"],
        typer.Option(help="What to improve: one answer, all streams together, or peak memory."),
    ] = "latency",
    minutes: Annotated[float, typer.Option(min=0.2, max=1440, help="Time to search.")] = 5.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31, help="Seed for the order of measurements.")
    ] = 0,
    undo: Annotated[
        bool, typer.Option("--undo", help="Restore the profile before the last tuning.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure although the machine is not free.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Search for the flags with which a model runs best on this machine.

    Measures variants of its profile on engines of its own, beside the daemon. The best one is
    written to profiles.d/MODEL.toml if it is really faster and its answers are as good.
    """
    from supervisor.bench.tune import TuneOptions
    from supervisor.cli import tune as command

    if undo:
        finish("tune", lambda: command.undo(model), as_json=as_json)
    options = TuneOptions(goal, minutes, seed)
    finish("tune", lambda: command.tune(model, config, options, force=force), as_json=as_json)


usage_commands = typer.Typer()


@usage_commands.command()
def usage(
    by: Annotated[
        Literal["key", "model", "day", "month"] | None,
        typer.Option(help="How to group the lines. Unset: by key and model."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DAY", help="2026-11-22, 2026-11, or 7d. Unset: all.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only this API key.", autocompletion=offer("key"))
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only this model.", autocompletion=offer("model"))
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Show the tokens, slot time and processor time that each API key used.

    Works without a daemon. CACHED tokens were taken from a cache instead of being computed.
    """
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json exclude each other")
    from supervisor.cli.history import usage as call
    from supervisor.records.usage import Query

    finish("usage", lambda: call(Query(by, since, key, model), as_csv=as_csv), as_json=as_json)


record_commands = typer.Typer(help="Sizes and pauses of requests on disk.", no_args_is_help=True)


@record_commands.command("show")
def record_show(as_json: Json = False) -> None:
    """Show how many requests of each model are recorded: figures only, no text."""
    from supervisor.cli.history import show_recorded as call

    finish("record show", call, as_json=as_json)


@record_commands.command("forget")
def record_forget(
    model: Annotated[
        str | None, typer.Argument(help="The model.", autocompletion=offer("model"))
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded figures; works without a daemon."""
    from supervisor.cli.history import forget_recorded as call

    finish("record forget", lambda: call(model, everything=everything), as_json=as_json)
