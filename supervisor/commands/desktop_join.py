"""Joins the desktop backend of a runtime directory, and starts one where none runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from supervisor.commands.spawn_daemon import spawn_daemon
from supervisor.control.client import Client
from supervisor.control.messages import JoinedHost, StreamMessage
from supervisor.errors import DaemonBusy, DaemonStopping, NotRunning
from supervisor.host.lock import read_owner
from supervisor.host.paths import Directories
from supervisor.host.process_end import process_end

_TIMEOUT_S: Final = 30.0
# How long a daemon that holds the lock gets to answer, or to end, before another one is tried.
_ANSWER_S: Final = 0.5
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Joined:
    """A place among the daemon's hosts, held while `messages` is open.

    Attributes:
        started: The models meant, where the daemon was started for this host; else None.
    """

    messages: Iterator[StreamMessage]
    host: JoinedHost
    started: tuple[str, ...] | None


def join(
    client: Client, where: Directories, words: Sequence[str], options: Sequence[str]
) -> Joined:
    """Join, within half a minute; `words` and `options` are those of a daemon to start.

    Raises:
        CorralError: No daemon can be started, or one runs that is no desktop backend.
    """
    until_s = time.monotonic() + _TIMEOUT_S
    started, spawn_at_s = None, 0.0
    with _lifeline() as stdin:
        while True:
            try:
                messages = client.host()
                return Joined(messages, next(messages)["host"], started)
            except DaemonStopping:
                _wait_ended(where, until_s)
            except NotRunning:
                if time.monotonic() > until_s:
                    raise
            if time.monotonic() < spawn_at_s:
                time.sleep(_POLL_S)
                continue
            try:
                started = spawn_daemon(words, ["--desktop", *options], where, stdin)
            except DaemonBusy:  # another host's, which holds the lock before it answers
                spawn_at_s = time.monotonic() + _ANSWER_S


@contextmanager
def _lifeline() -> Iterator[int]:
    """A pipe that closes at the end of the block, and when this process is killed; its far end."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def _wait_ended(where: Directories, until_s: float) -> None:
    """Wait for a daemon that is stopping; raises DaemonStopping when it takes too long."""
    with process_end(read_owner(where.state_file)) as end:
        if not end.wait(max(0.0, until_s - time.monotonic())):
            raise DaemonStopping(
                "the daemon of this runtime directory has been stopping for half a minute",
                hint="corral stop, once more, ends it at once",
                log=str(where.daemon_log),
            )
