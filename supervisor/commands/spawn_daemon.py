"""Starts a daemon (`supervisor.commands.serve`) in a session of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from supervisor.errors import Interrupted, StartFailed, from_json
from supervisor.host.paths import Directories

# Its tracebacks name lines, not columns: the tables of these take 0.7 MB.
DAEMON: Final = ("-X", "no_debug_ranges", "-m", "supervisor.commands.serve")


def spawn_daemon(
    words: Sequence[str],
    options: Sequence[str],
    where: Directories,
    stdin: int = subprocess.DEVNULL,
) -> tuple[str, ...]:
    """Start a daemon, wait until it answers, and return the models meant.

    It resolves the words in our working directory, and warns on our stderr until it has.

    Raises:
        CorralError: That of the daemon, or StartFailed.
        Interrupted: Ctrl-C; the daemon was told to end.
    """
    reader, writer = os.pipe()
    argv = [sys.executable, *DAEMON, "--report-fd", str(writer), *options]
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
    try:
        with os.fdopen(reader, encoding="utf-8") as reports:
            report = json.loads(reports.readline() or "null")
    except KeyboardInterrupt as interrupt:
        daemon.terminate()  # no model was started, and none would be
        raise Interrupted(
            "stopped before the daemon answered; it ends", hint="corral start starts it again"
        ) from interrupt
    if report is None:
        raise StartFailed("the daemon exited before it answered", log=str(where.daemon_log))
    if "error" in report:
        raise from_json(report["error"])
    return tuple(report["models"])


def settings_options(config: Path | None, listen: str | None) -> list[str]:
    """The options of a daemon for a settings file and an address."""
    named = ["--config", str(config)] if config else []
    return [*named, "--listen", listen] if listen else named
