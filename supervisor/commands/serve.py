"""`corral serve`: the daemon itself, in the foreground or started by `corral start`."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from supervisor import log
from supervisor.commands.targets import Targets, choose, settings_reader
from supervisor.daemon import Daemon
from supervisor.errors import CorralError
from supervisor.events import EventStream
from supervisor.failures import FailureHandler
from supervisor.host.descriptors import raise_descriptor_limit
from supervisor.host.paths import Directories, directories, make_private
from supervisor.output import CommandResult
from supervisor.process.log_file import LogFile


def serve(
    words: Sequence[str], config: Path | None, listen: str | None, report_fd: int | None
) -> CommandResult:
    """Run the daemon until it is told to end.

    Args:
        words: The models to bring up; none means all that come up with the daemon.
        config: The settings file that was named.
        listen: The address that was named.
        report_fd: Set by `corral start`: a pipe for one line of JSON, `{"ok": true}` or
            `{"error": …}`. Such a daemon brings up nothing by itself, and logs to a file.
    """
    raise_descriptor_limit()
    where = directories()
    with _reporting(report_fd) as report:
        is_background = report_fd is not None
        choice = choose(words, config, where, listen)
        with _sink(where, is_background=is_background) as sink:
            wanted = () if is_background else _wanted(words, choice)
            daemon = functools.partial(
                Daemon,
                choice.loaded,
                settings_reader(choice, where, listen),
                where,
                EventStream(sink),
            )
            _run(daemon, wanted, report)
    return CommandResult(None)


def _wanted(words: Sequence[str], choice: Targets) -> list[str]:
    """Return the models to bring up at once: those named, or those that come up with the daemon."""
    models = choice.loaded.settings.models
    return [name for name in choice.names if words or models[name].preload]


def _run(
    make_daemon: Callable[[], Daemon], wanted: Sequence[str], report: Callable[[], None]
) -> None:
    async def main() -> None:
        logging.basicConfig(level=logging.WARNING, handlers=[FailureHandler()])
        await make_daemon().run(wanted, report)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextmanager
def _sink(where: Directories, *, is_background: bool) -> Iterator[log.Sink]:
    if not is_background:
        yield log.stream_sink(sys.stderr)
        return
    make_private(where.log)
    with LogFile(where.daemon_log, streams=(1, 2)) as file:
        yield log.json_sink(lambda line: file.write(f"{line}\n".encode()))


@contextmanager
def _reporting(report_fd: int | None) -> Iterator[Callable[[], None]]:
    """Tell whoever waits on the pipe that the daemon answers, or why it does not come up."""

    def say(content: object) -> None:
        nonlocal report_fd
        if report_fd is not None:
            os.write(report_fd, json.dumps(content).encode() + b"\n")
            os.close(report_fd)
            report_fd = None

    try:
        yield lambda: say({"ok": True})
    except CorralError as error:
        say({"error": error.as_json()})
        raise
