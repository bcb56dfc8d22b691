"""The address of an RPC worker, its last answer, and the probe that reads its devices.

The engine that will use a worker probes it: `llama-server --rpc HOST:PORT --list-devices` has the
engine's own version of the protocol, so a start would find the same. A worker serves one
connection at a time: while an engine uses it, nothing else gets an answer, and an idle connection
would keep the engine out.

Source: llama.cpp, ggml-rpc.cpp, rpc_serve_client; output of build 10434.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from supervisor.builds.discover import Device, Engine, read_devices
from supervisor.builds.probe import environment
from supervisor.errors import SettingsInvalid, WorkerMismatch, WorkerUnreachable
from supervisor.settings.tables import exposure

LOOPBACK: Final = "127.0.0.1"
UNPROTECTED: Final = (
    "its protocol has no authentication and no encryption: any program that reaches it can "
    "read the model and the texts, and run code"
)


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The address of a worker; port 0 is not chosen yet."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def check_listen_host(host: str) -> str | None:
    """Return a warning for an address that other machines reach, or None.

    Raises SettingsInvalid: it is not an IPv4 address, or all machines could reach it.
    """
    match exposure(host):
        case "loopback":
            return None
        case "private":
            return f"a worker that listens on {host} is reached by other machines; {UNPROTECTED}"
        case None:
            raise SettingsInvalid(
                f"a worker cannot listen on {host}: it takes an IPv4 address only",
                hint="name a private address of this machine, such as 192.168.1.7",
            )
        case _:
            raise SettingsInvalid(
                f"a worker does not listen on {host}: {UNPROTECTED}",
                hint="name one private address of this machine, such as 192.168.1.7; across "
                "networks, use a tunnel (WireGuard, ssh -L)",
            )


def free_port(host: str = LOOPBACK) -> int:
    """Choose a port that is free now; raises OSError if the address is not this machine's."""
    with socket.socket(socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def check_port(address: WorkerAddress) -> None:
    """Check that a worker can listen, as the program reports a taken port only after its start.

    Raises OSError: the port is taken, or the address is not this machine's.
    """
    with socket.socket(socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address.host, address.port))


class KnownWorkers:
    """The ports of local workers, and the last answers of workers.

    `choose_port` returns the port of a local worker that has none in the settings; 0 in a command.
    """

    def __init__(self, choose_port: Callable[[], int] = lambda: 0) -> None:
        self._choose_port = choose_port
        self._ports: dict[str, int] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._problems: dict[str, str] = {}

    def port(self, name: str) -> int:
        """Return the port of a local worker, the same until the daemon ends."""
        if name not in self._ports:
            self._ports[name] = self._choose_port()
        return self._ports[name]

    def note_port(self, name: str, port: int) -> None:
        self._ports[name] = port

    def devices(self, address: WorkerAddress) -> tuple[Device, ...]:
        """Return the devices of the last answer; none if it never answered."""
        return self._devices.get(str(address), ())

    def problem(self, address: WorkerAddress) -> str | None:
        """Return the error of the last probe, if any."""
        return self._problems.get(str(address))

    def note_devices(self, address: WorkerAddress, devices: tuple[Device, ...]) -> None:
        self._devices[str(address)] = devices
        self._problems.pop(str(address), None)

    def note_problem(self, address: WorkerAddress, reason: str) -> None:
        self._problems[str(address)] = reason


# This includes the start of the engine, seconds on a loaded machine. A model may run without a late
# worker, so a limit that is too short is worse than waiting for a worker that is in use.
LIMIT_S: Final = 10.0
_NO_BACKTRACE: Final = {"GGML_NO_BACKTRACE": "1"}  # a later build aborts without an answer
_START: Final = "start it there (`corral worker`), or check the address in [workers]"


def probe(engine: Engine, address: WorkerAddress, limit_s: float = LIMIT_S) -> tuple[Device, ...]:
    """Return the devices; blocks for twice the limit. Raises WorkerUnreachable, WorkerMismatch."""
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
        raise WorkerUnreachable(
            f"worker {address.name} at {address} accepts connections, but did not answer within "
            f"{limit_s:g} s",
            hint="another engine may use it: a worker serves one engine at a time",
        ) from error
    except OSError as error:
        raise WorkerUnreachable(
            f"cannot ask worker {address.name}: {engine.path}: {error.strerror}"
        ) from error
    return found_devices(address, (done.stdout + done.stderr).decode("utf-8", "replace"))


def found_devices(address: WorkerAddress, output: str) -> tuple[Device, ...]:
    """Read the devices of one worker from the output; raises as `probe`."""
    if mismatch := re.search(r"RPC server version mismatch: (\d[\d.]*)", output):
        raise WorkerMismatch(
            f"worker {address.name} at {address} speaks RPC protocol {mismatch[1]}, "
            "which this engine does not",
            hint="use the same build of llama.cpp on both machines (`corral engine list`)",
        )
    found = tuple(device for device in read_devices(output) if device.description == str(address))
    if not found:
        raise WorkerUnreachable(
            f"worker {address.name} at {address} does not answer as a ggml-rpc-server of this "
            "engine's build",
            hint=_START,
        )
    return found


def _connect(address: WorkerAddress, limit_s: float) -> None:
    """Connect and close at once, which gives the reason if that fails."""
    try:
        socket.create_connection((address.host, address.port), timeout=limit_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no DNS can have
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkerUnreachable(
            f"worker {address.name} at {address} does not answer: {reason.lower()}", hint=_START
        ) from error
