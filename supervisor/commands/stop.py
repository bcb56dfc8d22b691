"""`corral stop`: let answers finish, then stop models, or the daemon with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import filelock

from supervisor.commands.targets import resolve_running
from supervisor.control.client import Client
from supervisor.errors import DaemonBusy, NotRunning
from supervisor.host.lock import read_owner
from supervisor.host.paths import Directories, directories
from supervisor.host.process_end import process_end
from supervisor.output import CommandResult

# Between the last word of a daemon and the end of its process there is next to nothing to do.
_GONE_WITHIN_S: Final = 10.0


def stop(words: Sequence[str]) -> CommandResult:
    """Stop the named models, or the daemon; stopping what does not run is no error."""
    where = directories()
    client = Client(where.control_socket)
    try:
        if not words:
            return end_daemon(where)
        return _send_away(client, "stop", "stopped", words)
    except NotRunning:
        return CommandResult({"running": False}, "the daemon is not running")


def unload(words: Sequence[str]) -> CommandResult:
    """Send models out of memory until they are called again; without words, all of them.

    Raises:
        NotRunning: No daemon runs.
    """
    return _send_away(Client(directories().control_socket), "unload", "unloaded", words)


def _send_away(client: Client, verb: str, done: str, words: Sequence[str]) -> CommandResult:
    status = client.status()
    names = resolve_running(words, status)
    gone = names or tuple(model["name"] for model in status["models"])
    for line in client.command(verb, names):
        if "done" in line:
            return CommandResult(line["done"], "\n".join(f"{done}: {name}" for name in gone))
    raise DaemonBusy("the daemon ended before it was done", hint="corral logs shows why")


def end_daemon(where: Directories) -> CommandResult:
    """Tell the daemon to end, and wait until it has.

    The stream of the shutdown ends a little before the lock is given up, and that before the
    process ends.

    Raises:
        NotRunning: No daemon runs.
        DaemonBusy: It does not answer, or its process does not end.
    """
    with process_end(read_owner(where.state_file)) as end:
        for _ in Client(where.control_socket).shutdown():
            pass
        if not (_is_free(where) and end.wait(_GONE_WITHIN_S)):
            raise DaemonBusy(
                "the daemon stopped everything but its own process, "
                "or another was started meanwhile",
                hint="corral status shows which",
            )
    return CommandResult({"running": False}, "stopped")


def _is_free(where: Directories) -> bool:
    """Wait for the lock of the runtime directory; return whether it was given up."""
    try:
        with filelock.FileLock(where.lock_file, timeout=_GONE_WITHIN_S, mode=0o600):
            return True
    except filelock.Timeout:
        return False
