"""The command line: each verb calls its command, shows the result, and returns an exit code.

A verb imports its command when it runs, so that `--help` and `corral status` start fast.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from supervisor import __version__
from supervisor.output import CommandResult, run_command

_HELP_COMMON: Final = """Run llama.cpp's llama-server well.

Examples:

  corral model get smollm2              fetch the demo model

  corral start smollm2                  serve it in the background

  corral start ~/models/qwen3.gguf      serve any GGUF file

  corral status                         state, load and speed

  corral stop                           finish running requests, then stop

Exit codes: 0 success, 1 failure, 2 usage error, 3 not running, 4 no such model,
69 daemon or machine busy, 78 invalid settings, 130 interrupted.
"""

app = typer.Typer(
    name="corral",
    help=_HELP_COMMON,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
engine_app = typer.Typer(help="llama-server binaries on this machine.", no_args_is_help=True)
model_app = typer.Typer(help="GGUF files.", no_args_is_help=True)
profile_app = typer.Typer(help="Named sets of tuned flags.", no_args_is_help=True)
slots_app = typer.Typer(help="Conversations on disk.", no_args_is_help=True)
record_app = typer.Typer(help="Sizes and pauses of requests on disk.", no_args_is_help=True)
key_app = typer.Typer(help="API keys of clients.", no_args_is_help=True)
batch_app = typer.Typer(help="Files of requests, computed as batches.", no_args_is_help=True)
service_app = typer.Typer(help="The daemon as a service of systemd.", no_args_is_help=True)
config_app = typer.Typer(help="The settings file, corral.toml.", no_args_is_help=True)
app.add_typer(engine_app, name="engine")
app.add_typer(model_app, name="model")
app.add_typer(profile_app, name="profile")
app.add_typer(config_app, name="config")
app.add_typer(service_app, name="service")
app.add_typer(slots_app, name="slots")
app.add_typer(record_app, name="record")
app.add_typer(key_app, name="key")
app.add_typer(batch_app, name="batch")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON envelope.")]
Config = Annotated[Path | None, typer.Option("--config", help="Read this settings file.")]
Listen = Annotated[str | None, typer.Option("--listen", help="HOST:PORT for clients; port 0: any.")]
Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help="Names from corral.toml, fetched models, or GGUFs."),
]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names; none means all.")
]


def main() -> None:
    app()


def _finish(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> None:
    raise typer.Exit(run_command(command, call, as_json=as_json))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _version(value: bool) -> None:  # noqa: FBT001 (Typer passes an option's value by position)
    if value:
        typer.echo(f"llama-corral {__version__}")
        raise typer.Exit


@app.callback()
def _corral(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


_corral.__doc__ = _HELP_COMMON


# Running models


@app.command()
def serve(
    models: Models = None,
    config: Config = None,
    listen: Listen = None,
    desktop: Annotated[
        bool,
        typer.Option(
            "--desktop",
            help="Serve a desktop application: any free port of 127.0.0.1 with an API key, events "
            "as JSON lines on standard output. Ends when standard input is closed.",
        ),
    ] = False,
    watch_pid: Annotated[
        int | None,
        typer.Option(min=1, metavar="PID", help="With --desktop: end when this process ends."),
    ] = None,
    report_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the daemon in the foreground until Ctrl-C.

    One Ctrl-C lets running requests finish, a second shortens the wait to 5 s, a third ends it.
    SIGHUP reloads the settings, as corral reload does.
    """
    if watch_pid and not desktop:
        raise typer.BadParameter("--watch-pid needs --desktop")
    if desktop and report_fd is None:
        if listen:
            raise typer.BadParameter("--desktop chooses the address; leave out --listen")
        from supervisor.commands.desktop import serve_desktop

        _finish("serve", lambda: serve_desktop(models or [], config, watch_pid), as_json=False)
    # Until the daemon handles signals, Ctrl-C kills it: a KeyboardInterrupt could be raised in the
    # clean-up of an import, where Python ignores it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from supervisor.commands.serve import serve as call

    _finish(
        "serve",
        lambda: call(models or [], config, listen, report_fd, is_desktop=desktop),
        as_json=False,
    )


@app.command()
def start(
    models: Models = None,
    config: Config = None,
    listen: Listen = None,
    wait: Annotated[bool, typer.Option(help="Return only when the models are ready.")] = True,
    as_json: Json = False,
) -> None:
    """Start models in the background; returns when they are ready."""
    from supervisor.commands.start import start as call

    _finish("start", lambda: call(models or [], config, listen, wait=wait), as_json=as_json)


@app.command()
def worker(  # noqa: PLR0913, PLR0917 (a command has its options)
    host: Annotated[
        str, typer.Option(help="A loopback or private IPv4 address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free port.")] = 50_052,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads. Unset: half of all CPUs.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Devices to offer, with commas. Unset: all, or the CPU.")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(min=1, metavar="MIB", help="Memory to offer, where it can be set.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Keep large tensors on disk, for faster loads.")
    ] = False,
    config: Config = None,
) -> None:
    """Run an RPC worker in the foreground until Ctrl-C: it computes layers for models elsewhere.

    It serves one engine at a time. Its protocol has no authentication and no encryption: other
    machines reach it only at a private address that --host names.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in `serve`
    from supervisor.commands.worker import worker as call
    from supervisor.workers.program import WorkerOptions

    memory_bytes = memory * 1024**2 if memory else None
    options = WorkerOptions(host, port, threads, device, cache, memory_bytes)
    _finish("worker", lambda: call(options, config), as_json=False)


@app.command()
def stop(models: Names = None, as_json: Json = False) -> None:
    """Drain and stop models; without names, the daemon too."""
    from supervisor.commands.stop import stop as call

    _finish("stop", lambda: call(models or []), as_json=as_json)


@app.command()
def restart(models: Names = None, as_json: Json = False) -> None:
    """Drain models and start them again."""
    from supervisor.commands.start import restart as call

    _finish("restart", lambda: call(models or []), as_json=as_json)


@app.command()
def load(models: Names = None, as_json: Json = False) -> None:
    """Load models into memory, unloading idle ones if needed."""
    from supervisor.commands.start import load as call

    _finish("load", lambda: call(models or []), as_json=as_json)


@app.command()
def unload(models: Names = None, as_json: Json = False) -> None:
    """Unload models until a request needs them; without names, all."""
    from supervisor.commands.stop import unload as call

    _finish("unload", lambda: call(models or []), as_json=as_json)


@app.command()
def reload(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change; change nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Apply changed settings without cutting requests.

    Models whose settings are unchanged keep their processes. Invalid settings change nothing. Exits
    with 1 if a changed model did not start; its old process then continues.
    """
    from supervisor.commands.reload import reload as call

    _finish("reload", lambda: call(dry_run=dry_run), as_json=as_json)


@app.command()
def status(as_json: Json = False) -> None:
    """Show state, slots, speed and memory. Exits with 3 if the daemon is not running."""
    from supervisor.commands.status import status as call

    _finish("status", call, as_json=as_json)


@app.command()
def logs(
    model: Annotated[str | None, typer.Argument(help="A model; none means the daemon.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Show new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("-n", min=0, max=100_000, help="How many old lines.")] = 50,
    raw: Annotated[bool, typer.Option("--raw", help="Pass control characters on.")] = False,
    as_json: Json = False,
) -> None:
    """Show the log of a model's engines, or of the daemon."""
    from supervisor.commands.logs import logs as call

    _finish("logs", lambda: call(model, lines, keep_reading=follow, raw=raw), as_json=as_json)


@app.command()
def events(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Show events as they happen, until Ctrl-C."""
    from supervisor.commands.events import events as call

    _finish("events", lambda: call(as_json=as_json), as_json=False)


@app.command()
def doctor(config: Config = None, as_json: Json = False) -> None:
    """Check everything that serving needs, with a fix for each problem.

    Exits with 1 if something will not work. The report contains no secrets and no user name.
    """
    from supervisor.commands.doctor import doctor as call

    _finish("doctor", lambda: call(config), as_json=as_json)


@app.command()
def plan(model: str, config: Config = None, as_json: Json = False) -> None:
    """Show the exact llama-server command for a model, and the origin of each flag."""
    from supervisor.commands.plan import plan as call

    _finish("plan", lambda: call(model, config), as_json=as_json)


@app.command()
def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, typer.Argument(help="A name from corral.toml, or a GGUF.")],
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
        _names(profiles), _names(workload), repeats, minutes, seed, force, report
    )
    _finish("bench", lambda: call(model, config, options), as_json=as_json)


@app.command()
def trial(
    model: Annotated[
        str | None, typer.Argument(help="A model with a trial; none means all.")
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
    from supervisor.commands.trial import finish, show

    if apply and end:
        raise typer.BadParameter("give --apply or --end, not both")

    def call() -> CommandResult:
        return finish(model, is_applied=apply) if apply or end else show(model)

    _finish("trial", call, as_json=as_json)


@app.command()
def balance(
    model: Annotated[
        str | None, typer.Argument(help="A model with workers; none means all.")
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
    _finish("balance", lambda: call(model), as_json=as_json)


@app.command()
def tune(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: Annotated[str, typer.Argument(help="From corral.toml, fetched, or a GGUF file.")],
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
        _finish("tune", lambda: command.undo(model), as_json=as_json)
    options = TuneOptions(goal, minutes, seed)
    _finish("tune", lambda: command.tune(model, config, options, force=force), as_json=as_json)


@app.command()
def warm(model: str, file: Path, as_json: Json = False) -> None:
    """Prefill a prompt on a running model: a system prompt, or a chat request in .json."""
    from supervisor.commands.warm import warm as call

    _finish("warm", lambda: call(model, file), as_json=as_json)


# Batches

Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Write the results there, and errors beside it."),
]


@batch_app.command("run")
def batch_run(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Requests, one a line.")],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compute a file of requests in OpenAI's batch format, and write the results beside it.

    Exits with 1 if a line failed. After Ctrl-C the batch goes on, after a second one it is
    cancelled. Where the daemon needs an API key, it is read from CORRAL_API_KEY.
    """
    from supervisor.commands.batch import run as call

    _finish("batch run", lambda: call(file, output), as_json=as_json)


@batch_app.command("list")
def batch_list(as_json: Json = False) -> None:
    """List the newest batches."""
    from supervisor.commands.batch import list_batches as call

    _finish("batch list", call, as_json=as_json)


@batch_app.command("show")
def batch_show(batch: str, output: Output = None, as_json: Json = False) -> None:
    """Show how far a batch is, and what is wrong with its lines."""
    from supervisor.commands.batch import show as call

    _finish("batch show", lambda: call(batch, output), as_json=as_json)


@batch_app.command("cancel")
def batch_cancel(batch: str, as_json: Json = False) -> None:
    """Cancel a batch; the results that it has are kept."""
    from supervisor.commands.batch import cancel as call

    _finish("batch cancel", lambda: call(batch), as_json=as_json)


# Saved conversations


@slots_app.command("list")
def slots_list(as_json: Json = False) -> None:
    """List the saved conversations."""
    from supervisor.commands.slots import list_slots as call

    _finish("slots list", call, as_json=as_json)


@slots_app.command("save")
def slots_save(models: Names = None, as_json: Json = False) -> None:
    """Save the idle slots of running models now."""
    from supervisor.commands.slots import save as call

    _finish("slots save", lambda: call(models or []), as_json=as_json)


@slots_app.command("forget")
def slots_forget(
    model: Annotated[str | None, typer.Argument(help="The model.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete saved conversations and learned prompts; works without a daemon."""
    from supervisor.commands.slots import forget as call

    _finish("slots forget", lambda: call(model, everything=everything), as_json=as_json)


# Recorded sizes and pauses of requests


@record_app.command("show")
def record_show(as_json: Json = False) -> None:
    """Show how many requests of each model are recorded: figures only, no text."""
    from supervisor.commands.record import show as call

    _finish("record show", call, as_json=as_json)


@record_app.command("forget")
def record_forget(
    model: Annotated[str | None, typer.Argument(help="The model.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the recorded figures; works without a daemon."""
    from supervisor.commands.record import forget as call

    _finish("record forget", lambda: call(model, everything=everything), as_json=as_json)


# Engines


@engine_app.command("list")
def engine_list(config: Config = None, as_json: Json = False) -> None:
    """List all llama-server builds found; the first is the one in use."""
    from supervisor.commands.engine import list_engines as call

    _finish("engine list", lambda: call(config), as_json=as_json)


@engine_app.command("path")
def engine_path(config: Config = None, as_json: Json = False) -> None:
    """Print the path of the llama-server in use."""
    from supervisor.commands.engine import path as call

    _finish("engine path", lambda: call(config), as_json=as_json)


@engine_app.command("help")
def engine_help(
    flag: Annotated[str | None, typer.Argument(help="One flag; none means all.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the options of the llama-server in use, read from its --help."""
    from supervisor.commands.engine import show_help as call

    _finish("engine help", lambda: call(flag, config), as_json=as_json)


# Models


@model_app.command("get")
def model_get(name: str, as_json: Json = False) -> None:
    """Download a pinned model, unless it is there and complete."""
    from supervisor.commands.model import get as call

    _finish("model get", lambda: call(name), as_json=as_json)


@model_app.command("list")
def model_list(as_json: Json = False) -> None:
    """List the pinned models, and whether each was downloaded."""
    from supervisor.commands.model import list_models as call

    _finish("model list", call, as_json=as_json)


@model_app.command("show")
def model_show(file: str, as_json: Json = False) -> None:
    """Show the metadata of a GGUF file."""
    from supervisor.commands.model import show_model as call

    _finish("model show", lambda: call(file), as_json=as_json)


# Profiles


@profile_app.command("list")
def profile_list(as_json: Json = False) -> None:
    """List the profiles, shipped and your own."""
    from supervisor.commands.profile import list_profiles as call

    _finish("profile list", call, as_json=as_json)


@profile_app.command("show")
def profile_show(name: str, as_json: Json = False) -> None:
    """Show a profile's flags, with those it inherits."""
    from supervisor.commands.profile import show_profile as call

    _finish("profile show", lambda: call(name), as_json=as_json)


@profile_app.command("check")
def profile_check(
    name: Annotated[str | None, typer.Argument(help="One profile; none means all.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Check profiles against the llama-server in use."""
    from supervisor.commands.profile import check as call

    _finish("profile check", lambda: call(name, config), as_json=as_json)


# Settings


@config_app.command("check")
def config_check(config: Config = None, as_json: Json = False) -> None:
    """Check the settings and plan every model, without starting anything."""
    from supervisor.commands.config import check as call

    _finish("config check", lambda: call(config), as_json=as_json)


@config_app.command("show")
def config_show(config: Config = None, as_json: Json = False) -> None:
    """Show the value and origin of every setting."""
    from supervisor.commands.config import show_settings as call

    _finish("config show", lambda: call(config), as_json=as_json)


@config_app.command("path")
def config_path(config: Config = None, as_json: Json = False) -> None:
    """Show the settings file and all directories."""
    from supervisor.commands.config import paths as call

    _finish("config path", lambda: call(config), as_json=as_json)


# API keys


@key_app.command("add")
def key_add(  # noqa: PLR0913, PLR0917 (a command has its options)
    name: Annotated[str, typer.Argument(help="Its name in logs and limits.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model it may use; repeat for more. Unset: all."),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Requests at once.")
    ] = None,
    rpm: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Requests a minute.")
    ] = None,
    priority: Annotated[
        Literal["interactive", "batch"],
        typer.Option(help="batch: all other requests go first."),
    ] = "interactive",
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Create a random API key, print it once, and store only its SHA-256.

    A running daemon accepts it within a second.
    """
    from proxy.auth.keys_file import Key
    from supervisor.commands.key import add as call

    key = Key(name, b"", in_flight, rpm, frozenset(models) if models else None, priority)
    _finish("key add", lambda: call(key, config), as_json=as_json)


@key_app.command("list")
def key_list(config: Config = None, as_json: Json = False) -> None:
    """List the API keys with their limits."""
    from supervisor.commands.key import list_keys as call

    _finish("key list", lambda: call(config), as_json=as_json)


@key_app.command("remove")
def key_remove(name: str, config: Config = None, as_json: Json = False) -> None:
    """Remove an API key; a running daemon rejects it within a second."""
    from supervisor.commands.key import remove as call

    _finish("key remove", lambda: call(name, config), as_json=as_json)


# The service

IsUser = Annotated[
    bool | None,
    typer.Option(
        "--user/--system", help="Of this user, or of the system. Unset: of the system for root."
    ),
]


def _scope(is_user: bool | None) -> Literal["user", "system"]:  # noqa: FBT001 (an option's value)
    is_root = os.geteuid() == 0
    return "user" if is_user or (is_user is None and not is_root) else "system"


@service_app.command("install")
def service_install(
    user: IsUser = None,
    config: Config = None,
    start: Annotated[bool, typer.Option(help="Start it, and apply changes, at once.")] = True,
    as_json: Json = False,
) -> None:
    """Write the units, enable and start them. Repeat it after changes of listen, limits or keys.

    A service of the system runs as the user llama-corral, with /etc/llama-corral/corral.toml.
    """
    from supervisor.commands.service import install as call

    _finish("service install", lambda: call(_scope(user), config, start=start), as_json=as_json)


@service_app.command("uninstall")
def service_uninstall(user: IsUser = None, as_json: Json = False) -> None:
    """Stop the service and remove its units; settings and data stay."""
    from supervisor.commands.service import uninstall as call

    _finish("service uninstall", lambda: call(_scope(user)), as_json=as_json)


@service_app.command("status")
def service_status(user: IsUser = None, as_json: Json = False) -> None:
    """Show the state of the service. Exits with 3 if it is not active."""
    from supervisor.commands.service import status as call

    _finish("service status", lambda: call(_scope(user)), as_json=as_json)


@service_app.command("show")
def service_show(
    user: IsUser = None,
    config: Config = None,
    kind: Annotated[
        Literal["systemd", "launchd", "windows"] | None,
        typer.Option("--format", help="Unset: of this system. launchd and windows are untested."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the units, a launch agent or a note for Windows; install nothing."""
    from supervisor.commands.service import show as call

    _finish("service show", lambda: call(_scope(user), config, kind), as_json=as_json)


if __name__ == "__main__":
    main()
