"""Builds `corral`, and declares the commands of the daemon, the service, and measurements."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import typer
from typer import Argument, BadParameter, Option, Typer
from typer.core import TyperGroup

from supervisor import __version__
from supervisor.cli import app_requests, app_setup
from supervisor.cli.options import (
    LIMIT_MAX_S,
    Config,
    Everywhere,
    Json,
    Listen,
    ModelName,
    Models,
    Names,
    read_flag,
    read_seconds,
    verb,
    word,
)
from supervisor.errors import Interrupted
from supervisor.output import CommandResult

run_commands = Typer()


@verb(run_commands, has_json=False)
def serve(
    models: Models,
    config: Config = None,
    listen: Listen = None,
    desktop: bool = False,
    watch_pid: Annotated[int | None, Option(min=1, metavar="PID")] = None,
) -> CommandResult:
    """Run the daemon in the foreground until Ctrl-C.

    One Ctrl-C lets running requests finish, a second shortens the wait to 5 s, a third ends it.
    SIGHUP reloads the settings, as corral reload does.

    Args:
        desktop: Serve a desktop application: any free port of 127.0.0.1 with an API key, events as
            JSON lines on standard output. Ends when standard input is closed.
        watch_pid: With --desktop: end when this process ends.
    """
    if watch_pid and not desktop:
        raise BadParameter("--watch-pid needs --desktop")
    if desktop:
        if listen:
            raise BadParameter("--desktop chooses the address; leave out --listen")
        from supervisor.cli.desktop_host import serve_desktop

        return serve_desktop(models, config, watch_pid)
    # Until the daemon handles signals, Ctrl-C kills it: a KeyboardInterrupt could be raised in the
    # clean-up of an import, where Python ignores it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from supervisor.cli.serve import serve as call

    return call(models, config, listen, None)


@verb(run_commands)
def start(  # noqa: PLR0913, PLR0917 (a command has its options)
    models: Models,
    ctx_size: Annotated[int | None, Option(min=0, metavar="TOKENS")] = None,
    slots: Annotated[int | None, Option("--parallel", "--slots", min=1)] = None,
    profile: Annotated[str | None, word("profile", "--profile")] = None,
    flags: Annotated[list[str] | None, Option("--flag", metavar="NAME=VALUE")] = None,
    save: bool = False,
    config: Config = None,
    listen: Listen = None,
    wait: bool = True,
) -> CommandResult:
    """Start models in the background; returns when they are ready.

    Args:
        ctx_size: Context of all slots together.
        slots: Requests at a time.
        profile: A set of tuned flags, as listed by corral profile list.
        flags: Any other flag of llama-server: threads=4. Repeat for more.
        save: Keep these options and the models in corral.toml; otherwise they apply until the
            daemon stops.
        wait: Return only when the models are ready.
    """
    from supervisor.cli.start import start as call

    named = {"ctx-size": ctx_size, "parallel": slots}
    own = {**named, **dict(map(read_flag, flags or ()))}
    given = {key: value for key, value in own.items() if value is not None}
    changes = {key: value for key, value in {"profile": profile, "flags": given}.items() if value}
    if (changes or save) and not models:
        raise BadParameter("name the models that these options are for")
    return call(models, config, listen, wait=wait, changes=changes, save=save)


@verb(run_commands)
def run(
    model: ModelName,
    prompt: Annotated[list[str] | None, Argument(metavar="[PROMPT]...")] = None,
    options: Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE")] = None,
    config: Config = None,
    as_json: Json = False,
) -> CommandResult:
    """Chat with a model in the terminal, or answer one prompt. Works without a daemon too.

    A prompt and standard input give one answer, which goes to standard output: cat FILE | corral
    run MODEL "summarise". Without both, the chat begins; /help lists its commands.

    Args:
        prompt: One question; the path of an image in it sends the image.
        options: Such as temperature=0 or system=TEXT; repeat for more.
    """
    from supervisor.cli.run import run as call

    return call(model, prompt or [], options or [], config, as_json=as_json)


@verb(run_commands, has_json=False)
def worker(  # noqa: PLR0913, PLR0917 (a command has its options)
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65_535)] = 50_052,
    threads: Annotated[int | None, Option(min=1, max=1024)] = None,
    device: str | None = None,
    memory: Annotated[int | None, Option(min=1, metavar="MIB")] = None,
    cache: bool = False,
    config: Config = None,
) -> CommandResult:
    """Run an RPC worker in the foreground until Ctrl-C. It computes layers for other machines.

    It serves one engine at a time. Its protocol has no authentication and no encryption: other
    machines reach it only at a private address, which --host must name.

    Args:
        host: A loopback or private IPv4 address of this machine.
        port: 0: any free port.
        threads: Threads. Unset: half of all CPUs.
        device: Devices to offer, with commas. Unset: all, or the CPU.
        memory: Memory to offer, if the build can.
        cache: Keep large tensors on disk, for faster loads.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in `serve`
    from supervisor.cli.engine import worker as call
    from supervisor.rpc.worker import WorkerOptions

    memory_bytes = memory * 1024**2 if memory else None
    return call(WorkerOptions(host, port, threads, device, cache, memory_bytes), config)


@verb(run_commands, "start.stop")
def stop(models: Names) -> None:
    """Drain and stop models; without names, the daemon too."""


@verb(run_commands, "start.restart")
def restart(models: Names) -> None:
    """Drain models and start them again."""


@verb(run_commands, "start.load")
def load(models: Names) -> None:
    """Load models into memory, unloading idle ones if needed."""


@verb(run_commands, "start.unload")
def unload(models: Names) -> None:
    """Unload models until a request needs them; without names, all."""


@verb(run_commands, name="yield")
def yield_devices(
    duration: Annotated[
        float | None, Argument(parser=read_seconds, metavar="[DURATION]", show_default=False)
    ] = None,
    end: bool = False,
) -> CommandResult:
    """Leave the devices to other programs for a time.

    Models that use them finish their answers, save their conversations and stop; requests for them
    fail meanwhile. At the end, those that were loaded are loaded again.

    Args:
        duration: Such as 90s, 30m or 2h; without one, until --end.
        end: Take the devices back now.
    """
    if duration is not None and end:
        raise BadParameter("--end takes the devices back now, so it has no duration")
    if duration is not None and not 0 < duration <= LIMIT_MAX_S:
        raise BadParameter("the duration is above 0s and at most 31d; without one, it has no limit")
    from supervisor.cli.start import yield_devices as call

    return call(duration, end=end)


@verb(run_commands, "start.reload")
def reload(dry_run: bool = False) -> None:
    """Apply changed settings without interrupting requests.

    Models whose settings are unchanged keep their processes. Invalid settings change nothing. Exits
    with 1 if a changed model did not start; its old process then continues.

    Args:
        dry_run: Show the changes; apply none.
    """


@verb(run_commands, "status.status")
def status(everywhere: Everywhere = False) -> None:
    """Show state, slots, speed and memory. Exits with 3 if the daemon is not running."""


@verb(run_commands, "status.ui")
def ui(
    no_browser: Annotated[bool, Option("--no-browser", "--print")] = False, as_json: Json = False
) -> None:
    """Open the dashboard in the browser, signed in.

    It shows models, requests, caches, usage and logs, and has a chat.

    Args:
        no_browser: Print the link instead of opening it.
    """


@verb(run_commands, "top.top")
def top(
    once: bool = False,
    interval_s: Annotated[float, Option("--interval", min=0.2, max=60, metavar="S")] = 1.0,
    as_json: Json = False,
) -> None:
    """Show models and the requests in flight, refreshed every second.

    Keys: j, k or arrows select a request; x cancels it; a, m, t, n, c, p sort by age, model,
    tokens per second, tokens, client, phase (again: reversed); q quits. Without a terminal it
    prints one frame.

    Args:
        once: Print one frame and exit.
        interval_s: Seconds between refreshes.
    """


@verb(run_commands, "history.logs")
def logs(
    model: Annotated[str | None, word("model")] = None,
    keep_reading: Annotated[bool, Option("-f", "--follow")] = False,
    lines: Annotated[int, Option("-n", min=0, max=100_000)] = 50,
    raw: bool = False,
) -> None:
    """Show the log of a model's engines, or of the daemon.

    Args:
        model: A model; none means the daemon.
        keep_reading: Show new lines until Ctrl-C.
        lines: Number of old lines.
        raw: Print control characters unchanged.
    """


@verb(run_commands, "history.events", has_json=False)
def events(as_json: Annotated[bool, Option("--json")] = False) -> None:
    """Show events as they happen, until Ctrl-C.

    Args:
        as_json: Print one JSON object a line.
    """


@verb(run_commands, "start.warm")
def warm(model: ModelName, file: Path) -> None:
    """Prefill a prompt on a running model, so that it is in the cache.

    The file is a system prompt, or a chat request in .json.
    """


service_commands = Typer(
    name="service", help="The daemon as a service of systemd.", no_args_is_help=True
)

Scope = Annotated[
    bool | None,
    Option(
        "--user/--system",
        callback=lambda is_user: (
            "user" if is_user or (is_user is None and os.geteuid()) else "system"
        ),
        help="A service of this user or of the system. Unset: system for root.",
    ),
]


@verb(service_commands, "serve.install")
def service_install(scope: Scope = None, config: Config = None, start: bool = True) -> None:
    """Write the units, enable and start them. Repeat it after changes of listen, limits or keys.

    A service of the system runs as the user llama-corral, with /etc/llama-corral/corral.toml.

    Args:
        start: Start it, and apply changes, at once.
    """


@verb(service_commands, "serve.uninstall")
def service_uninstall(scope: Scope = None) -> None:
    """Stop the service and remove its units; settings and data stay."""


@verb(service_commands, "serve.status")
def service_status(scope: Scope = None) -> None:
    """Show the state of the service. Exits with 3 if it is not active."""


@verb(service_commands, "serve.show")
def service_show(
    scope: Scope = None,
    config: Config = None,
    kind: Annotated[Literal["systemd", "launchd", "windows"] | None, Option("--format")] = None,
) -> None:
    """Print the units, a launch agent or a note for Windows.

    Args:
        kind: Unset: for this system. launchd and windows are untested.
    """


slurm_commands = Typer(
    name="slurm", help="Daemons as tasks of a Slurm cluster.", no_args_is_help=True
)

JobName = Annotated[str, Option("--name", help="Name of the jobs.")]
_JOB_NAME: Final = "llama-corral"


@verb(slurm_commands, "slurm.submit")
def slurm_submit(
    script: Annotated[Path, Argument(metavar="SCRIPT")],
    tasks: Annotated[int, Option(min=1, max=1000)] = 1,
    name: JobName = _JOB_NAME,
) -> None:
    """Submit a job script as an array of tasks.

    Args:
        script: Such as scripts/deploy/slurm/corral.sbatch, with its options as #SBATCH lines.
        tasks: Number of daemons.
    """


@verb(slurm_commands, "slurm.status")
def slurm_status(name: JobName = _JOB_NAME) -> None:
    """Show the tasks; corral status shows their daemons as nodes."""


@verb(slurm_commands)
def slurm_scale(  # noqa: PLR0913, PLR0917 (a command has its options)
    tasks: Annotated[int | None, Argument(min=0, max=1000, metavar="[TASKS]")] = None,
    auto: bool = False,
    least: Annotated[int, Option("--min", min=0, max=1000)] = 1,
    most: Annotated[int, Option("--max", min=1, max=1000)] = 4,
    grow_after_s: Annotated[float, Option("--grow-after", min=0, metavar="SECONDS")] = 30,
    shrink_after_s: Annotated[float, Option("--shrink-after", min=0, metavar="SECONDS")] = 600,
    script: Annotated[Path | None, Option(metavar="SCRIPT")] = None,
    name: JobName = _JOB_NAME,
) -> CommandResult:
    """Submit more tasks, or drain some.

    Args:
        tasks: Number of tasks to reach.
        auto: Follow the requests at the front, which runs here, until Ctrl-C.
        least: With --auto, fewest tasks. With 0, all end when no request has come for as long as
            --shrink-after says, and the first starts when one waits; needs --script.
        most: With --auto, most tasks.
        grow_after_s: With --auto, submit more tasks when requests have waited this long.
        shrink_after_s: With --auto, end a task when one fewer has sufficed for this long.
        script: Job script of new tasks. Unset: that of the tasks that exist.
    """
    from supervisor.cli import slurm
    from supervisor.service.slurm import Bounds

    if auto is (tasks is not None):
        raise BadParameter("give a number of tasks or --auto")
    if least > most:
        raise BadParameter("--min is above --max")
    if tasks is not None:
        return slurm.scale(name, tasks, script)
    if not (least or script):
        raise BadParameter("--min 0 needs --script: without a task, there is no script to use")
    bounds = Bounds(least, most, grow_after_s, shrink_after_s)
    return slurm.scale_automatically(name, bounds, script)


@verb(slurm_commands, "slurm.cancel")
def slurm_cancel(now: bool = False, name: JobName = _JOB_NAME) -> None:
    """Drain and end all tasks.

    Args:
        now: Do not wait for requests.
    """


measure_commands = Typer()


@verb(measure_commands, "report.doctor")
def doctor(config: Config = None) -> None:
    """Check everything that serving needs, with a fix for each problem.

    Exits with 1 if something will not work. The report contains no secrets and no user name.
    """


@verb(measure_commands, "plan.plan")
def plan(model: ModelName, config: Config = None) -> None:
    """Show the llama-server command of a model, with its reasons."""


@verb(measure_commands)
def explain(
    request_id: Annotated[str | None, word("any request", metavar="ID")] = None,
    client: str | None = None,
    since: str = "7d",
    rules: Annotated[list[str] | None, Option("--rule", metavar="RULE")] = None,
    capture_file: Annotated[Path | None, Option("--capture", metavar="FILE")] = None,
) -> CommandResult:
    """Show why a request took so long, or missed the cache.

    With --client: how a client changes its prompts, what the changes cost, and the prompt rules
    that undo them. With --capture and --rule: a prompt of `corral capture`, before and after.

    Args:
        request_id: From `corral requests --last 20`. Unset: the latest.
        client: Show how this API key or address changes its prompts.
        since: With --client: 90s, 15m, 1h, 2d, or a date.
        rules: With --capture: such as move:date, or sort-tools.
        capture_file: Show the last prompt of this capture before and after the rules.
    """
    from supervisor.cli import history

    if (capture_file is None) is not (not rules):
        raise BadParameter("give --capture and --rule together")
    if capture_file is not None:
        from supervisor.cli.capture import show_rules

        return show_rules(capture_file, rules or [], request_id)
    if client is not None:
        return history.explain_client(client, since)
    return history.explain_request(request_id)


@verb(measure_commands, "bench.bench")
def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, word("model")],
    profiles: str = "",
    workload: str = "",
    repeats: Annotated[int | None, Option(min=1, max=1000)] = None,
    minutes: Annotated[float | None, Option(min=0.1, max=10_000)] = None,
    seed: Annotated[int | None, Option(min=0)] = None,
    force: bool = False,
    report: Annotated[Path | None, Option(metavar="FILE.html")] = None,
    config: Config = None,
    as_lines: Annotated[bool, Option("--lines", hidden=True)] = False,
) -> None:
    """Measure a model under several profiles, side by side.

    It starts separate engines; a running daemon is not disturbed. Without --profiles:
    llama-server's own defaults against the model's profile. Each round starts every variant once,
    in another order. Ctrl-C keeps the results so far (exit code 130).

    Args:
        model: A name from corral.toml, or a GGUF.
        profiles: Profiles to compare, with commas; `plain` is llama-server's own defaults.
        workload: Workloads to measure, with commas: chat, long-prompt, generation, concurrent,
            batch, embedding, yours. Unset: all that suit the model.
        repeats: Rounds. Unset: 5.
        minutes: As many rounds as fit in this time.
        seed: Repeat the texts and the order of an earlier run.
        force: Measure although the machine is not free.
        report: Write a report with plots to this file.
    """


@verb(measure_commands)
def trial(
    model: Annotated[str | None, word("model")] = None, apply: bool = False, end: bool = False
) -> CommandResult:
    """Show the figures of a live trial of another profile.

    --apply or --end finishes the trial. Both change corral.toml, keep its comments, write a backup
    beside it, and reload. No answer is interrupted.

    Args:
        model: A model with a trial; none means all.
        apply: Make the profile on trial the model's own.
        end: End the trial.
    """
    from supervisor.cli.trial import finish, show

    if apply and end:
        raise BadParameter("give --apply or --end, not both")
    return finish(model, is_applied=apply) if apply or end else show(model)


@verb(measure_commands)
def balance(
    model: Annotated[str | None, word("model")] = None, apply: bool = False, undo: bool = False
) -> CommandResult:
    """Show the times of a split model's workers, and layers to move.

    --apply stores the new split in a file of the daemon. Requests wait while the model loads.

    Args:
        model: A model with workers; none means all.
        apply: Move the layers as suggested; loads the model again.
        undo: Move the layers back to their previous workers.
    """
    from supervisor.cli import start

    if apply and undo:
        raise BadParameter("give --apply or --undo, not both")
    call = start.apply if apply else start.undo if undo else start.show
    return call(model)


@verb(measure_commands)
def tune(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, word("model")],
    goal: Literal["latency", "throughput", "memory"] = "latency",
    minutes: Annotated[float, Option(min=0.2, max=1440)] = 5.0,
    seed: Annotated[int, Option(min=0, max=2**31)] = 0,
    check: bool = False,
    undo: bool = False,
    force: bool = False,
    config: Config = None,
) -> CommandResult:
    """Search for the flags with which a model runs best on this machine.

    Measures variants of its profile on separate engines, beside the daemon. The best one is
    written to profiles.d/MODEL.toml if it is really faster and its answers are as good.

    After a change of the engine or of the model's file, --check measures that file again: it is
    removed if it is slower than the profile, or its answers are worse.

    Args:
        model: From corral.toml, fetched, or a GGUF file.
        goal: The figure to improve: one answer, all streams together, or peak memory.
        minutes: Time to search.
        seed: Seed for the order of measurements.
        check: Measure the profile of the last tuning again.
        undo: Restore the profile before the last tuning.
        force: Measure although the machine is not free.
    """
    from supervisor.cli import bench as command

    if undo:
        return command.undo(model)
    if check:
        return command.check_tuned(model, config, minutes, seed, force=force)
    return command.tune(model, config, goal, minutes, seed, force=force)


# The commands of `corral --help`, in the order in which people meet them.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "Use it": ("run", "start", "stop", "status", "ui", "connect"),
        "Models": ("model", "load", "unload", "restart", "yield", "warm", "engine"),
        "Look": ("top", "requests", "explain", "logs", "events", "slots", "usage", "record"),
        "Tune": ("plan", "profile", "bench", "tune", "trial", "capture", "replay"),
        "Operate": (
            *("serve", "init", "import", "config", "reload", "service"),
            *("key", "hooks", "batch", "doctor", "report"),
        ),
        "Machines": ("worker", "balance", "slurm"),
    }
)
_LINE_MAX: Final = 80


class _GroupedCommands(TyperGroup):
    """Lists the commands in groups, each with the whole first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            found = (command for name in names if (command := self.get_command(ctx, name)))
            rows = [
                ((command.name or "").ljust(width), command.get_short_help_str(_LINE_MAX))
                for command in found
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


# Click keeps the lines of a paragraph that begins with a backspace.
_HELP: Final = """Run llama.cpp's llama-server well.

\b
corral run smollm2          chat in the terminal
corral start smollm2        serve OpenAI, Anthropic and Ollama clients
corral model get smollm2    fetch this small model; any GGUF file does too
"""

app = Typer(
    name="corral",
    cls=_GroupedCommands,
    help=_HELP,
    epilog="Exit codes: 0 success, 1 failure, 2 usage error, 3 not running, 4 no such model, "
    "69 daemon or machine busy, 78 invalid settings, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _group in (
    run_commands,
    measure_commands,
    app_requests.capture_commands,
    app_setup.setup_commands,
    app_requests.usage_commands,
    app_setup.engine_commands,
    app_setup.model_commands,
    app_setup.profile_commands,
    app_setup.config_commands,
    service_commands,
    slurm_commands,
    app_requests.requests_commands,
    app_setup.hooks_commands,
    app_requests.slots_commands,
    app_requests.record_commands,
    app_setup.key_commands,
    app_requests.batch_commands,
):
    app.add_typer(_group)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:  # while arguments are parsed; `run_command` handles later ones
        raise SystemExit(Interrupted.exit_code) from None


def _version(value: bool) -> None:
    if value:
        typer.echo(f"llama-corral {__version__}")
        raise typer.Exit


@app.callback()
def _corral(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options of `corral` itself."""
