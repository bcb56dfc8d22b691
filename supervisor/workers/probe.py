"""Asks a worker what it offers, by the engine that will use it.

`llama-server --rpc HOST:PORT --list-devices` speaks the engine's own version of the protocol, so
its answer is what a start would find. A worker serves one connection at a time: while an engine
uses it, nothing else gets an answer, and an idle connection would keep the engine out.

Source: llama.cpp, ggml-rpc.cpp, rpc_serve_client; output of build 10434.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from typing import Final

from supervisor.engines.discover import Device, Engine, read_devices
from supervisor.engines.probe import environment
from supervisor.errors import WorkerMismatch, WorkerUnreachable
from supervisor.workers.address import WorkerAddress

# The engine's own start counts, which takes seconds on a loaded machine. A model may run without
# a worker that is too late, so a limit too short would do worse than wait for one that is in use.
LIMIT_S: Final = 10.0
_MISMATCH: Final = re.compile(r"RPC server version mismatch: (\d[\d.]*)")
_NO_BACKTRACE: Final = {"GGML_NO_BACKTRACE": "1"}  # a later build aborts without an answer
_START: Final = "start it there (`corral worker`), or check the address in [workers]"


def probe(engine: Engine, address: WorkerAddress, limit_s: float = LIMIT_S) -> tuple[Device, ...]:
    """Return the devices that a worker offers; blocks, for twice the limit at most.

    Raises:
        WorkerUnreachable: It does not answer.
        WorkerMismatch: It speaks another version of the protocol.
    """
    _connect(address, limit_s)
    try:
        done = subprocess.run(
            [*engine.command, "--rpc", str(address), "--list-devices"],
            env=environment(os.environ, engine.path, engine.library_dirs) | _NO_BACKTRACE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise _busy(address, limit_s) from error
    except OSError as error:
        raise WorkerUnreachable(
            f"cannot ask worker {address.name}: {engine.path}: {error.strerror}"
        ) from error
    return found_devices(address, (done.stdout + done.stderr).decode("utf-8", "replace"))


def found_devices(address: WorkerAddress, output: str) -> tuple[Device, ...]:
    """Read the devices of one worker from the output; raises as `probe`."""
    if mismatch := _MISMATCH.search(output):
        raise WorkerMismatch(
            f"worker {address.name} at {address} speaks RPC protocol {mismatch[1]}, "
            "which this engine does not",
            hint="use the same build of llama.cpp on both machines (`corral engine list`)",
        )
    found = tuple(one for one in read_devices(output) if one.description == str(address))
    if not found:
        raise WorkerUnreachable(
            f"worker {address.name} at {address} does not answer as a ggml-rpc-server of this "
            "engine's build",
            hint=_START,
        )
    return found


def _connect(address: WorkerAddress, limit_s: float) -> None:
    """Connect and close at once, for the reason where that fails."""
    try:
        socket.create_connection((address.host, address.port), timeout=limit_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no DNS can have
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkerUnreachable(
            f"worker {address.name} at {address} does not answer: {reason.lower()}", hint=_START
        ) from error


def _busy(address: WorkerAddress, limit_s: float) -> WorkerUnreachable:
    return WorkerUnreachable(
        f"worker {address.name} at {address} accepts connections, but did not answer within "
        f"{limit_s:g} s",
        hint="another engine may use it: a worker serves one engine at a time",
    )
