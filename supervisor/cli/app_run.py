"""Declares the commands of the daemon, its models, and the system service."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Literal

from typer import BadParameter, Option, Typer

from supervisor.cli.options import Config, Json, Listen, ModelName, Models, Names, flag, verb, word
from supervisor.output import CommandResult

run_commands = Typer()


@verb(run_commands, has_json=False)
def serve(
    models: Models = None,
    config: Config = None,
    listen: Listen = None,
    desktop: Annotated[
        bool,
        Option(
            "--desktop",
            help="Serve a desktop application: any free port of 127.0.0.1 with an API key, events "
            "as JSON lines on standard output. Ends when standard input is closed.",
        ),
    ] = False,
    watch_pid: Annotated[
        int | None, Option(min=1, metavar="PID", help="With --desktop: end when this process ends.")
    ] = None,
) -> CommandResult:
    """Run the daemon in the foreground until Ctrl-C.

    One Ctrl-C lets running requests finish, a second shortens the wait to 5 s, a third ends it.
    SIGHUP reloads the settings, as corral reload does.
    """
    if watch_pid and not desktop:
        raise BadParameter("--watch-pid needs --desktop")
    if desktop:
        if listen:
            raise BadParameter("--desktop chooses the address; leave out --listen")
        from supervisor.cli.desktop_host import serve_desktop

        return serve_desktop(models or [], config, watch_pid)
    # Until the daemon handles signals, Ctrl-C kills it: a KeyboardInterrupt could be raised in the
    # clean-up of an import, where Python ignores it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from supervisor.cli.serve import serve as call

    return call(models or [], config, listen, None)


@verb(run_commands)
def start(
    models: Models = None,
    config: Config = None,
    listen: Listen = None,
    wait: Annotated[bool, Option(help="Return only when the models are ready.")] = True,
) -> CommandResult:
    """Start models in the background; returns when they are ready."""
    from supervisor.cli.start import start as call

    return call(models or [], config, listen, wait=wait)


@verb(run_commands, has_json=False)
def worker(  # noqa: PLR0913, PLR0917 (a command has its options)
    host: Annotated[
        str, Option(help="A loopback or private IPv4 address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65_535, help="0: any free port.")] = 50_052,
    threads: Annotated[
        int | None, Option(min=1, max=1024, help="Threads. Unset: half of all CPUs.")
    ] = None,
    device: Annotated[
        str | None, Option(help="Devices to offer, with commas. Unset: all, or the CPU.")
    ] = None,
    memory: Annotated[
        int | None, Option(min=1, metavar="MIB", help="Memory to offer, if the build can.")
    ] = None,
    cache: Annotated[
        bool, flag("--cache", "Keep large tensors on disk, for faster loads.")
    ] = False,
    config: Config = None,
) -> CommandResult:
    """Run an RPC worker in the foreground until Ctrl-C. It computes layers for other machines.

    It serves one engine at a time. Its protocol has no authentication and no encryption: other
    machines reach it only at a private address, which --host must name.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in `serve`
    from supervisor.cli.worker import worker as call
    from supervisor.rpc.worker import WorkerOptions

    memory_bytes = memory * 1024**2 if memory else None
    options = WorkerOptions(host, port, threads, device, cache, memory_bytes)
    return call(options, config)


@verb(run_commands)
def stop(models: Names = None) -> CommandResult:
    """Drain and stop models; without names, the daemon too."""
    from supervisor.cli.start import stop as call

    return call(models or [])


@verb(run_commands)
def restart(models: Names = None) -> CommandResult:
    """Drain models and start them again."""
    from supervisor.cli.start import restart as call

    return call(models or [])


@verb(run_commands)
def load(models: Names = None) -> CommandResult:
    """Load models into memory, unloading idle ones if needed."""
    from supervisor.cli.start import load as call

    return call(models or [])


@verb(run_commands)
def unload(models: Names = None) -> CommandResult:
    """Unload models until a request needs them; without names, all."""
    from supervisor.cli.start import unload as call

    return call(models or [])


@verb(run_commands)
def reload(
    dry_run: Annotated[bool, flag("--dry-run", "Show what would change; change nothing.")] = False,
) -> CommandResult:
    """Apply changed settings without cutting requests.

    Models whose settings are unchanged keep their processes. Invalid settings change nothing. Exits
    with 1 if a changed model did not start; its old process then continues.
    """
    from supervisor.cli.start import reload as call

    return call(dry_run=dry_run)


@verb(run_commands)
def status() -> CommandResult:
    """Show state, slots, speed and memory. Exits with 3 if the daemon is not running."""
    from supervisor.cli.status import status as call

    return call()


@verb(run_commands)
def ui(
    no_browser: Annotated[
        bool, Option("--no-browser", "--print", help="Print the link instead of opening it.")
    ] = False,
    as_json: Json = False,
) -> CommandResult:
    """Open the dashboard in the browser, signed in: models, requests, logs, a chat."""
    from supervisor.cli.status import ui as call

    return call(opens=not (no_browser or as_json))


@verb(run_commands)
def top(
    once: Annotated[bool, flag("--once", "Print one frame and exit.")] = False,
    interval: Annotated[
        float, Option(min=0.2, max=60, metavar="S", help="Seconds between refreshes.")
    ] = 1.0,
    as_json: Json = False,
) -> CommandResult:
    """Show models and the requests in flight, refreshed every second; select and cancel requests.

    Keys: j, k or arrows select; x cancels; a, m, t, n, c, p sort by age, model, tokens per second,
    tokens, client, phase (again: reversed); q quits. Without a terminal it prints one frame.
    """
    from supervisor.cli.top import top as call

    return call(interval, once=once or as_json)


@verb(run_commands)
def logs(
    model: Annotated[str | None, word("model", "A model; none means the daemon.")] = None,
    follow: Annotated[bool, Option("-f", "--follow", help="Show new lines until Ctrl-C.")] = False,
    lines: Annotated[int, Option("-n", min=0, max=100_000, help="How many old lines.")] = 50,
    raw: Annotated[bool, flag("--raw", "Pass control characters on.")] = False,
) -> CommandResult:
    """Show the log of a model's engines, or of the daemon."""
    from supervisor.cli.history import logs as call

    return call(model, lines, keep_reading=follow, raw=raw)


@verb(run_commands, has_json=False)
def events(
    as_json: Annotated[bool, flag("--json", "Print one JSON object a line.")] = False,
) -> CommandResult:
    """Show events as they happen, until Ctrl-C."""
    from supervisor.cli.history import events as call

    return call(as_json=as_json)


@verb(run_commands)
def warm(model: ModelName, file: Path) -> CommandResult:
    """Prefill a prompt on a running model: a system prompt, or a chat request in .json."""
    from supervisor.cli.start import warm as call

    return call(model, file)


service_commands = Typer(
    name="service", help="The daemon as a service of systemd.", no_args_is_help=True
)

IsUser = Annotated[
    bool | None,
    Option(
        "--user/--system", help="A service of this user or of the system. Unset: system for root."
    ),
]


def _scope(is_user: bool | None) -> Literal["user", "system"]:  # noqa: FBT001 (an option's value)
    is_root = os.geteuid() == 0
    return "user" if is_user or (is_user is None and not is_root) else "system"


@verb(service_commands, "install")
def service_install(
    user: IsUser = None,
    config: Config = None,
    start: Annotated[bool, Option(help="Start it, and apply changes, at once.")] = True,
) -> CommandResult:
    """Write the units, enable and start them. Repeat it after changes of listen, limits or keys.

    A service of the system runs as the user llama-corral, with /etc/llama-corral/corral.toml.
    """
    from supervisor.cli.serve import install as call

    return call(_scope(user), config, start=start)


@verb(service_commands, "uninstall")
def service_uninstall(user: IsUser = None) -> CommandResult:
    """Stop the service and remove its units; settings and data stay."""
    from supervisor.cli.serve import uninstall as call

    return call(_scope(user))


@verb(service_commands, "status")
def service_status(user: IsUser = None) -> CommandResult:
    """Show the state of the service. Exits with 3 if it is not active."""
    from supervisor.cli.serve import status as call

    return call(_scope(user))


@verb(service_commands, "show")
def service_show(
    user: IsUser = None,
    config: Config = None,
    kind: Annotated[
        Literal["systemd", "launchd", "windows"] | None,
        Option("--format", help="Unset: for this system. launchd and windows are untested."),
    ] = None,
) -> CommandResult:
    """Print the units, a launch agent or a note for Windows; install nothing."""
    from supervisor.cli.serve import show as call

    return call(_scope(user), config, kind)
