"""`corral stop` and `corral unload`: drain, then stop models, or the daemon with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import filelock

from supervisor.control.client import Client
from supervisor.control.running import last_message, resolve_running
from supervisor.errors import DaemonBusy, NotRunning
from supervisor.host.lock import read_owner
from supervisor.host.paths import Directories, directories
from supervisor.host.process_end import process_end
from supervisor.output import CommandResult

# After the last message of a shutdown, the daemon has almost nothing left to do.
_EXIT_TIMEOUT_S: Final = 10.0


def stop(words: Sequence[str]) -> CommandResult:
    """Stop the named models, or the daemon; it is not an error if nothing runs."""
    where = directories()
    try:
        if not words:
            return stop_daemon(where)
        return _take_down(Client(where.control_socket), "stop", "stopped", words)
    except NotRunning:
        return CommandResult({"running": False}, "the daemon is not running")


def unload(words: Sequence[str]) -> CommandResult:
    return _take_down(Client(directories().control_socket), "unload", "unloaded", words)


def _take_down(client: Client, verb: str, done: str, words: Sequence[str]) -> CommandResult:
    status = client.status()
    names = resolve_running(words, status)
    shown = names or tuple(model["name"] for model in status["models"])
    result = last_message(client.command(verb, names))["done"]
    return CommandResult(result, "\n".join(f"{done}: {name}" for name in shown))


def stop_daemon(where: Directories) -> CommandResult:
    """Shut the daemon down, and wait for its process to exit.

    The stream ends just before the daemon releases its lock, and that just before the process ends.
    """
    with process_end(read_owner(where.state_file)) as end:
        for _ in Client(where.control_socket).shutdown():
            pass
        if not (_is_lock_free(where) and end.wait(_EXIT_TIMEOUT_S)):
            raise DaemonBusy(
                "the engines stopped, but the daemon's own process still runs or another started",
                hint="corral status shows which",
            )
    return CommandResult({"running": False}, "stopped")


def _is_lock_free(where: Directories) -> bool:
    """Wait for the lock of the runtime directory; return whether it was released in time."""
    try:
        with filelock.FileLock(where.lock_file, timeout=_EXIT_TIMEOUT_S, mode=0o600):
            return True
    except filelock.Timeout:
        return False
