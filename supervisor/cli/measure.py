"""What serving needs, and what it reaches: checks, plans, measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, ModelName, finish, names_of, offer
from supervisor.output import CommandResult

commands = typer.Typer()


@commands.command()
def doctor(config: Config = None, as_json: Json = False) -> None:
    """Check everything that serving needs, with a fix for each problem.

    Exits with 1 if something will not work. The report contains no secrets and no user name.
    """
    from supervisor.commands.doctor import doctor as call

    finish("doctor", lambda: call(config), as_json=as_json)


@commands.command()
def plan(model: ModelName, config: Config = None, as_json: Json = False) -> None:
    """Show the exact llama-server command for a model, and the origin of each flag."""
    from supervisor.commands.plan import plan as call

    finish("plan", lambda: call(model, config), as_json=as_json)


@commands.command()
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Of `corral requests --last 20`. Unset: the latest.",
            autocompletion=offer("any request"),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show why a request took so long, and why its prompt was not in the cache."""
    from supervisor.commands.explain import explain_request as call

    finish("explain", lambda: call(request_id), as_json=as_json)


@commands.command()
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
    every variant once, in another order. A running daemon is not disturbed. Ctrl-C keeps what was
    measured (exit code 130).
    """
    from supervisor.commands.bench import BenchOptions
    from supervisor.commands.bench import bench as call

    options = BenchOptions(
        names_of(profiles), names_of(workload), repeats, minutes, seed, force, report
    )
    finish("bench", lambda: call(model, config, options), as_json=as_json)


@commands.command()
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
    """Show what a live trial of another profile shows; end it, with or without its profile.

    Both change corral.toml, which keeps its comments and gets a backup beside it, and reload. No
    answer is cut.
    """
    from supervisor.commands.trial import finish as finish_trial
    from supervisor.commands.trial import show

    if apply and end:
        raise typer.BadParameter("give --apply or --end, not both")

    def call() -> CommandResult:
        return finish_trial(model, is_applied=apply) if apply or end else show(model)

    finish("trial", call, as_json=as_json)


@commands.command()
def balance(
    model: Annotated[
        str | None,
        typer.Argument(help="A model with workers; none means all.", autocompletion=offer("model")),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Move the layers as suggested; loads the model again.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Move them back to where they were before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how long each worker of a split model takes, and which layers should move.

    --apply keeps the new split in a file of the daemon's; a request waits for the model meanwhile.
    """
    from supervisor.commands import balance as command

    if apply and undo:
        raise typer.BadParameter("give --apply or --undo, not both")
    call = command.apply if apply else command.undo if undo else command.show
    finish("balance", lambda: call(model), as_json=as_json)


@commands.command()
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
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the order of measurements.")] = 0,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take the last tuned profile back; measure nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure although the machine is not free.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Search the flags under which a model runs best on this machine.

    Measures variants of its profile on engines of its own, beside the daemon. The best one is
    written to profiles.d/MODEL.toml if it is really faster and its answers are as good.
    """
    from supervisor.commands import tune as command
    from supervisor.tune.job import TuneOptions

    if undo:
        finish("tune", lambda: command.undo(model), as_json=as_json)
    options = TuneOptions(goal, minutes, seed)
    finish("tune", lambda: command.tune(model, config, options, force=force), as_json=as_json)
