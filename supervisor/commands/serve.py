"""`corral serve`: the daemon, in the foreground or started by `corral start`.

What only the daemon needs is imported after the words are resolved: a mistake in them is reported
without the wait. `corral start` runs this module, not the command line, whose options of all
commands take 3 MB for as long as a process lives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.commands.targets import Targets, choose, settings_reader
from supervisor.desktop.starter import exit_with_starter
from supervisor.errors import CorralError
from supervisor.host.limits import raise_file_limit
from supervisor.host.paths import Directories, directories, make_private
from supervisor.output import CommandResult, run_command, warn
from supervisor.service.environment import ServiceEnvironment, take_service_environment
from supervisor.settings.load import load

if TYPE_CHECKING:
    from supervisor.daemon import Daemon
    from supervisor.log import Sink
    from supervisor.settings.load import Loaded


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
    daemon answers, or `{"error": …}`. The daemon then loads nothing by itself and logs to a file.
    A desktop backend needs an API key, and ends when its last host leaves.
    """
    raise_file_limit()
    where = directories()
    report = _Report(report_fd)
    try:
        environment = take_service_environment()
        listen = environment.listen or listen
        targets = choose(words, config, where, listen)
        if environment.listen:
            _compare_listen(environment.listen, targets.loaded.path, where)
        named = targets.names if words else ()
        wanted = () if report.is_open else named or _preloaded(targets)
        if is_desktop:
            _import_daemon()
        with _log_sink(where, to_file=report.is_open) as sink:
            _run(
                lambda: _daemon(
                    targets,
                    settings_reader(targets, where, listen),
                    where,
                    sink,
                    environment,
                    is_desktop=is_desktop,
                ),
                wanted,
                lambda: report.send({"models": named}),
            )
    except CorralError as error:
        if not report.is_open:
            raise
        report.send({"error": error.as_json()})  # `corral start` shows it
        return CommandResult(None, exit_code=error.exit_code)
    return CommandResult(None)


def main() -> int:
    """Run the daemon that `spawn_daemon` starts; return its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--listen")
    parser.add_argument("--desktop", action="store_true")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the daemon handles it
    return run_command(
        "serve",
        lambda: serve(
            given.words, given.config, given.listen, given.report_fd, is_desktop=given.desktop
        ),
        as_json=False,
    )


def _compare_listen(actual: str, path: Path | None, where: Directories) -> None:
    """Say that another address is configured than the service manager listens on."""
    wanted = load(path, config_dir=where.config).settings.proxy.listen
    if wanted != actual:
        warn(
            f"listen is {wanted} in the settings, and systemd listens on {actual}; "
            "corral service install changes that"
        )


def _import_daemon() -> None:
    """Import what takes longest of a start, while nothing would be left behind."""
    with exit_with_starter(0):
        import supervisor.daemon  # noqa: F401


class _Report:
    """The pipe to the process that waits for this daemon, if any; takes one message."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def send(self, content: Mapping[str, object]) -> None:
        if self._descriptor is not None:
            with suppress(BrokenPipeError):  # it was killed meanwhile
                os.write(self._descriptor, json.dumps(content).encode() + b"\n")
            os.close(self._descriptor)
            self._descriptor = None


def _preloaded(targets: Targets) -> list[str]:
    models = targets.loaded.settings.models
    return [name for name in targets.names if models[name].preload]


def _daemon(
    targets: Targets,
    reread: Callable[[], Loaded],
    where: Directories,
    sink: Sink,
    environment: ServiceEnvironment,
    *,
    is_desktop: bool,
) -> Daemon:
    from supervisor.daemon import Daemon
    from supervisor.daemon_parts import DaemonParts
    from supervisor.desktop.api_key import new_desktop_key
    from supervisor.events import EventStream

    key = new_desktop_key(where.desktop_key) if is_desktop else None
    parts = DaemonParts(targets.loaded, reread, where, EventStream(sink), environment, key)
    return Daemon(parts)


def _run(
    make_daemon: Callable[[], Daemon], wanted: Sequence[str], report: Callable[[], None]
) -> None:
    import uvloop

    from proxy.failures import FailureHandler
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
    from supervisor.process.log_file import LogFile, open_log

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


if __name__ == "__main__":
    sys.exit(main())
