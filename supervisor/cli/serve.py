"""Implements `corral serve` (the daemon, in the foreground or spawned) and `corral service`.

Modules that only the daemon needs are imported after the words are resolved, so mistakes in them
are reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from supervisor import errors
from supervisor.cli.targets import Targets, choose
from supervisor.daemon.desktop import exit_with_starter
from supervisor.output import CommandResult, run_command, warn
from supervisor.service import units
from supervisor.service.notifier import ServiceNotifier, take_service_environment
from supervisor.settings.load import load
from supervisor.system.daemon_lock import read_owner
from supervisor.system.limits import raise_file_limit
from supervisor.system.ownership import has_group
from supervisor.system.paths import Directories, directories, make_private, shipped_directory

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon
    from supervisor.log import Sink
    from supervisor.settings.load import Loaded

_CERTIFICATES: Final = "SSL_CERT_FILE"
# -P: files of the working directory are not imported. Without the tables of columns, which take
# 0.7 MB, tracebacks name only lines.
DAEMON: Final = ("-P", "-X", "no_debug_ranges", "-m", "supervisor.cli.serve")


def spawn_daemon(
    words: Sequence[str],
    options: Sequence[str],
    where: Directories,
    stdin: int = subprocess.DEVNULL,
) -> tuple[str, ...]:
    """Start a daemon, wait until it answers, and return the models that the words name.

    The daemon resolves the words in our working directory, and until then warns on our stderr.
    Raises its CorralError, StartFailed, or Interrupted after Ctrl-C (it was told to end).
    """
    reader, writer = os.pipe()
    argv = [sys.executable, *DAEMON, "--report-fd", str(writer), *options]
    daemon: subprocess.Popen[bytes] | None = None
    try:
        # Ctrl-C while Popen returns would lose the process that it started.
        with _defer_interrupt():
            try:
                daemon = subprocess.Popen(  # it outlives us by design
                    [*argv, "--", *words],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[writer],
                    start_new_session=True,
                )
            finally:
                os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as reports:
            report = json.loads(reports.readline() or "null")
    except KeyboardInterrupt as interrupt:
        if daemon is None:
            raise
        daemon.terminate()  # no model was started, and none would be
        raise errors.Interrupted(
            "stopped before the daemon answered; it ends", hint="corral start starts it again"
        ) from interrupt
    if report is None:
        raise errors.StartFailed("the daemon exited before it answered", log=str(where.daemon_log))
    if "error" in report:
        raise errors.from_json(report["error"])
    return tuple(report["models"])


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block, not within it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # ignored, or the caller's own
        yield
        return
    is_interrupted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if is_interrupted:
        raise KeyboardInterrupt


def settings_options(config: Path | None, listen: str | None) -> list[str]:
    named = ["--config", str(config)] if config else []
    return [*named, "--listen", listen] if listen else named


def import_daemon() -> None:
    """Import the daemon, the longest part of a start, without the system's certificates.

    aiohttp reads them into 2 MB of memory for a client that talks to engines alone; `system_tls`
    reads them when a node needs them. Source: OpenSSL, SSL_CTX_set_default_verify_paths(3).
    """
    certificates = os.environ.get(_CERTIFICATES)
    os.environ[_CERTIFICATES] = os.devnull
    try:
        import supervisor.daemon.daemon  # noqa: F401
    finally:
        del os.environ[_CERTIFICATES]
        if certificates is not None:
            os.environ[_CERTIFICATES] = certificates


def serve(
    words: Sequence[str],
    config: Path | None,
    listen: str | None,
    report_fd: int | None,
    *,
    is_desktop: bool = False,
) -> CommandResult:
    """Run the daemon; without words, it loads the models with `preload`.

    `report_fd` is a pipe to `corral start` for one line of JSON: `{"models": [names]}` when the
    daemon answers, or `{"error": …}`. The daemon then loads no model itself and logs to a file.
    A desktop backend needs an API key, and ends when its last host leaves.
    """
    raise_file_limit()
    _let_engines_compute()
    where = directories()
    report = _Report(report_fd)
    try:
        notifier = take_service_environment()
        listen = notifier.listen or listen
        targets = choose(words, config, where, listen)
        if notifier.listen:
            _compare_listen(notifier.listen, targets.loaded.path, where)
        named = targets.names if words else ()
        models = targets.loaded.settings.models
        preloaded = [name for name in targets.names if models[name].preload]
        wanted = () if report.is_open else named or preloaded
        with exit_with_starter(0) if is_desktop else nullcontext():  # it needs no clean-up
            import_daemon()
        with _log_sink(where, to_file=report.is_open) as sink:
            new_daemon = partial(
                _daemon, targets, listen, where, sink, notifier, is_desktop=is_desktop
            )
            _run(new_daemon, wanted, lambda: report.send({"models": named}))
    except errors.CorralError as error:
        if not report.is_open:
            raise
        report.send({"error": error.as_json()})  # `corral start` shows it
        return CommandResult(None, exit_code=error.exit_code)
    return CommandResult(None)


def _let_engines_compute() -> None:
    """Wait for a free processor at each wake-up, for a few milliseconds at most.

    Each token wakes this process. If it interrupted one thread of an engine, all others would wait
    for that one. Engines get the normal policy back (`supervisor.engine.child`). A policy that the
    user or the service manager has set is kept. Source: sched(7), SCHED_BATCH.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> int:
    """Run the daemon that `spawn_daemon` starts; return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--listen")
    parser.add_argument("--desktop", action="store_true", dest="is_desktop")
    parser.add_argument("words", nargs="*")
    given = vars(parser.parse_args())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the daemon handles it
    return run_command("serve", lambda: serve(**given), as_json=False)


def _compare_listen(actual: str, path: Path | None, where: Directories) -> None:
    """Warn if the service manager listens on another address than the configured one."""
    wanted = load(path, config_dir=where.config).settings.proxy.listen
    if wanted != actual:
        warn(
            f"listen is {wanted} in the settings, and systemd listens on {actual}; "
            "corral service install changes that"
        )


class _Report:
    """The pipe to the process that waits for this daemon, if any; takes one message."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def send(self, content: Mapping[str, object]) -> None:
        if self._descriptor is not None:
            with suppress(BrokenPipeError):  # the reader was killed
                os.write(self._descriptor, json.dumps(content).encode() + b"\n")
            os.close(self._descriptor)
            self._descriptor = None


def _daemon(
    targets: Targets,
    listen: str | None,
    where: Directories,
    sink: Sink,
    notifier: ServiceNotifier,
    *,
    is_desktop: bool,
) -> Daemon:
    from supervisor.daemon.daemon import Daemon
    from supervisor.daemon.desktop import new_desktop_key
    from supervisor.daemon.parts import DaemonParts
    from supervisor.events import EventStream

    def reread(content: bytes | None = None) -> Loaded:
        # Without words for models of the file, which may have other models by then.
        return choose(targets.added, targets.loaded.path, where, listen, content).loaded

    key = new_desktop_key(where.desktop_key) if is_desktop else None
    return Daemon(DaemonParts(targets.loaded, reread, where, EventStream(sink), notifier, key))


def _run(
    make_daemon: Callable[[], Daemon], wanted: Sequence[str], report: Callable[[], None]
) -> None:
    import uvloop

    from proxy.common.background_tasks import FailureHandler
    from proxy.server import tune_gc

    async def main() -> None:
        logging.basicConfig(level=logging.WARNING, handlers=[FailureHandler()])
        daemon = make_daemon()
        tune_gc()
        await daemon.run(wanted, report)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextmanager
def _log_sink(where: Directories, *, to_file: bool) -> Iterator[Sink]:
    from supervisor import log
    from supervisor.engine.log_file import LogFile, open_log

    if not to_file:
        yield log.stream_sink(sys.stderr)
        return
    make_private(where.log)
    descriptor = open_log(where.daemon_log)
    for ours in (1, 2):
        os.dup2(descriptor, ours)
    os.close(descriptor)
    os.chdir("/")  # keeps no file system busy
    with LogFile(where.daemon_log, streams=(1, 2)) as file:
        yield log.json_sink(lambda line: file.write(f"{line}\n".encode()))


Format = Literal["systemd", "launchd", "windows"]

_SYSTEM_CONFIG: Final = Path("/etc") / units.NAME
_DIRECTORY_VARIABLES: Final = tuple(
    f"CORRAL_{kind}_DIR" for kind in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME")
)
_EXIT_INACTIVE: Final = 3
_NATIVE: Final[Mapping[str, Format]] = MappingProxyType({"darwin": "launchd", "win32": "windows"})


def install(scope: units.Scope, config: Path | None, *, start: bool) -> CommandResult:
    if scope == "system" and os.geteuid() != 0:
        raise errors.AccessDenied(
            "a service of the system is installed by root",
            hint="sudo corral service install, or corral service install --user",
        )
    facts, paths = _facts(scope, config), _paths(scope)
    if scope == "user":
        _check_no_other_daemon(scope, directories())
    for note in _notes(facts):
        warn(note)
    files = units.service_files(facts, paths)
    units.install(scope, files, paths, start=start)
    lines = [*(f"wrote {path}" for path in files), *_next_steps(facts, start=start)]
    data = {"files": [str(path) for path in files], "started": start}
    return CommandResult(data, "\n".join(lines))


def uninstall(scope: units.Scope) -> CommandResult:
    removed = units.uninstall(scope, _paths(scope))
    kept = "settings, models and conversations are kept"
    lines = [*(f"removed {path}" for path in removed), kept] if removed else ["not installed"]
    return CommandResult({"removed": [str(path) for path in removed]}, "\n".join(lines))


def status(scope: units.Scope) -> CommandResult:
    state = units.service_state(scope)
    text = "\n".join(_service_lines(state)) if state["is_installed"] else "not installed"
    return CommandResult(state, text, exit_code=0 if state["is_active"] else _EXIT_INACTIVE)


def show(scope: units.Scope, config: Path | None, kind: Format | None) -> CommandResult:
    kind = kind or _NATIVE.get(sys.platform, "systemd")
    if kind == "systemd":
        files = units.service_files(_facts(scope, config), _paths(scope))
        text = "\n".join(f"# {path}\n{content}" for path, content in files.items())
        return CommandResult({str(path): content for path, content in files.items()}, text.rstrip())
    facts = _facts("user", config)
    log = str(directories().log / "daemon.log")
    text = units.launch_agent(facts, log) if kind == "launchd" else units.windows_note(facts)
    return CommandResult({kind: text}, text.rstrip())


def _facts(scope: units.Scope, config: Path | None) -> units.ServiceFacts:
    where = directories()
    if scope == "system":
        where = where.replace(config=_SYSTEM_CONFIG)
        config = config or _system_settings()
    loaded = choose((), config, where).loaded
    if loaded.path is None:
        raise errors.SettingsInvalid(
            "a service needs a settings file",
            hint=f"write {where.config / 'corral.toml'}, or name one: --config FILE",
        )
    # Variables that the daemon needs and a user's service manager does not have.
    names = ("PATH", *_DIRECTORY_VARIABLES)
    environment = {name: value for name in names if (value := os.environ.get(name))}
    program = Path(sys.executable).parent / "corral"
    module = (sys.executable, "-P", "-m", "supervisor.cli")
    return units.ServiceFacts(
        scope,
        (str(program),) if program.is_file() else module,
        loaded.path,
        loaded.settings,
        program_paths=(Path(sys.prefix), Path(sys.base_prefix), shipped_directory("profiles")),
        environment=environment if scope == "user" else {},
        groups=tuple(name for name in units.GPU_GROUPS if has_group(name)),
    )


def _system_settings() -> Path:
    path = _SYSTEM_CONFIG / "corral.toml"
    if not path.exists():
        raise errors.SettingsInvalid(
            f"a service of the system needs {path}, which does not exist",
            hint="write it, or name another file: --config FILE; --user is for your own settings",
        )
    return path


def _paths(scope: units.Scope) -> tuple[Path, ...]:
    if scope == "system":
        return units.SYSTEM_PATHS
    # Source: systemd.unit(5), "User Unit Search Path".
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return units.user_paths(Path(config) / "systemd" / "user")


def _check_no_other_daemon(scope: units.Scope, where: Directories) -> None:
    owner = read_owner(where.state_file)
    if owner and owner.is_alive() and owner.pid != units.service_state(scope)["pid"]:
        raise errors.DaemonBusy(
            f"a daemon already runs (pid {owner.pid}), and not as a service",
            hint="corral stop ends it; then install the service",
        )


def _next_steps(facts: units.ServiceFacts, *, start: bool) -> Iterator[str]:
    user = " --user" if facts.scope == "user" else ""
    if not start:
        yield f"systemctl{user} start {units.NAME} starts it"
    yield f"journalctl{user} -u {units.NAME} -f shows its log"
    if facts.scope == "user":
        yield "loginctl enable-linger lets it run while you are not logged in"
    else:
        yield f"sudo CORRAL_RUNTIME_DIR=/run/{units.NAME} corral status asks it"


def _notes(facts: units.ServiceFacts) -> Iterator[str]:
    if facts.scope == "system":
        yield from (
            f"{units.NAME} may not start: {path}"
            for path in units.reasons_unreachable(facts.read_paths)
        )
    known = {*_DIRECTORY_VARIABLES, "CORRAL_CONFIG", "CORRAL_API_KEY"}
    if others := sorted(name for name in os.environ.keys() - known if name.startswith("CORRAL_")):
        yield f"set here, but not for the service: {', '.join(others)}"


def _service_lines(state: Mapping[str, Any]) -> Iterator[str]:
    enabled = "" if state["is_enabled"] else ", not enabled"
    yield f"service  {state['state']}{enabled}"
    yield f"socket   {state['socket']}"
    if state["text"]:
        yield f"status   {state['text']}"
    if state["pid"]:
        yield f"pid      {state['pid']}"
    if state["result"] not in {"", "success"}:
        yield f"result   {state['result']}"
    if state["restarts"]:
        yield f"restarts {state['restarts']}"


if __name__ == "__main__":
    sys.exit(main())
