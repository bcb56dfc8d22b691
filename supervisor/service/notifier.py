"""Reports the daemon's state to the service manager, and takes the sockets that it passes.

    READY=1        clients and commands are answered; models may still load
    STATUS         instances ready, and the progress of those that load
    WATCHDOG=1     sent by a task, so a blocked event loop sends none
    RELOADING=1    new settings are being applied; READY=1 ends it
    STOPPING=1     running requests are finished, slots saved, engines stopped

While models load, settings are applied, or requests are drained, the manager's time limit is
extended: the daemon has its own limits, and a manager with shorter ones would kill it halfway.

The manager keeps listening sockets open over a restart, so connections wait in them until a daemon
accepts them.

Source: sd_notify(3); systemd.service(5), `WatchdogSec=`, `NotifyAccess=`; sd_listen_fds(3).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from typing import Final

from proxy.common.toml_types import is_loopback
from supervisor.errors import SettingsInvalid
from supervisor.events import LOAD_PROGRESS, Event, Part

_US_PER_S: Final = 1_000_000

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
PING: Final = "WATCHDOG=1"


def reloading_text(monotonic_ns: int) -> str:
    """`monotonic_ns` is of CLOCK_MONOTONIC; `READY` ends the reload."""
    return f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns // 1000}"


def status(text: str) -> str:
    return f"STATUS={' '.join(text.split())}"


def extend_timeout(by_s: float) -> str:
    """Ask for `by_s` more seconds, from now, for the running start, reload or stop."""
    return f"EXTEND_TIMEOUT_USEC={int(by_s * _US_PER_S)}"


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return the longest time without `PING`, or None. Source: sd_watchdog_enabled(3)."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    text = environ.get("WATCHDOG_USEC", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(2**64))
    return int(text) / _US_PER_S or None if is_number else None


# The manager reads at once; a message that does not fit waits no longer than this.
_SEND_TIMEOUT_S: Final = 0.1

Send = Callable[[str], None]


def open_notify_socket(environ: Mapping[str, str]) -> Send | None:
    """Return a function that sends a message, or None without a service manager.

    It never raises: a service works without its manager. `@` begins an abstract address.
    Source: sd_notify(3), unix(7).
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    target = f"\0{address[1:]}" if address.startswith("@") else address

    def send(message: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_SEND_TIMEOUT_S)
            channel.sendto(message.encode(errors="backslashreplace"), target)

    return send


_STATE_CHANGED: Final = "instance.state_changed"
_LOADING: Final = frozenset({"starting", "warming"})
# How many instances of each kind are named.
_NAMED_MAX: Final = 4


class LoadStatus:
    """The state of each instance, from its events."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._percent: dict[str, int] = {}

    @property
    def is_loading(self) -> bool:
        return not _LOADING.isdisjoint(self._states.values())

    def observe(self, event: Event) -> bool:
        """Return whether the event was about the state or the load of an instance."""
        if event.name == LOAD_PROGRESS:
            value = float(str(event.fields["value"]))
            self._percent[str(event.fields["instance"])] = int(100 * value)
        elif event.name == _STATE_CHANGED:
            instance, state = str(event.fields["instance"]), str(event.fields["after"])
            self._percent.pop(instance, None)
            self._states[instance] = state
            if state == "stopped":
                del self._states[instance]
        else:
            return False
        return True

    @property
    def text(self) -> str:
        states = self._states
        if not states:
            return "no model is loaded"
        ready = sum(state == "ready" for state in states.values())
        loading = [
            f"{name} {self._percent[name]} %" if name in self._percent else name
            for name, state in states.items()
            if state in _LOADING
        ]
        failed = [name for name, state in states.items() if state == "failed"]
        parts = [f"{ready} of {len(states)} instances ready"]
        parts += [f"loading {_list_text(loading)}"] if loading else []
        parts += [f"failed: {_list_text(failed)}"] if failed else []
        return "; ".join(parts)


def _list_text(names: Iterable[str]) -> str:
    first, rest = [*names][:_NAMED_MAX], [*names][_NAMED_MAX:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


_EXTENSION_S: Final = 30.0
_INTERVAL_S: Final = 5.0


class ServiceNotifier(Part):
    """Sends nothing without `send`, that is, without a service manager, which opens `sockets`."""

    task = "service notifier"

    def __init__(
        self,
        send: Send | None = None,
        watchdog_s: float | None = None,
        sockets: tuple[socket.socket, ...] = (),
    ) -> None:
        self._send_message = send
        self.sockets = sockets
        self._pings = (PING,) if watchdog_s else ()
        # Half of the limit. Source: sd_watchdog_enabled(3).
        self._interval_s = min(_INTERVAL_S, watchdog_s / 2 if watchdog_s else _INTERVAL_S)
        self._load = LoadStatus()
        self._text = ""
        self._is_started = self._is_stopping = False
        self._reloads = 0

    @property
    def listen(self) -> str | None:
        """The address of the sockets, which replaces `listen` under [proxy]."""
        return listen_address(self.sockets)

    def note_start(self) -> None:
        self._is_started = True
        self._send(READY)
        self._send_status()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload for the time of the block."""
        self._reloads += 1
        if self._is_serving:
            now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            self._send(reloading_text(now_ns), extend_timeout(_EXTENSION_S))
        try:
            yield
        finally:
            self._reloads -= 1
            if self._is_serving and not self._reloads:
                self._send(READY)

    @property
    def _is_serving(self) -> bool:
        return self._is_started and not self._is_stopping

    def observe(self, event: Event) -> None:
        if event.name == "daemon.stopping":
            self._is_stopping = True
            self._send(STOPPING, extend_timeout(_EXTENSION_S))
            self._send_status()
        elif self._load.observe(event):
            self._send_status()

    async def serve(self) -> None:
        """Send extensions and pings, at least at half the watchdog's limit, until cancelled."""
        if self._send_message is None:
            return
        while True:
            is_extending = self._is_stopping or self._reloads > 0 or self._load.is_loading
            extensions = [extend_timeout(_EXTENSION_S)] if is_extending else []
            self._send(*self._pings, *extensions)
            await asyncio.sleep(self._interval_s)

    def _send_status(self) -> None:
        text = f"stopping; {self._load.text}" if self._is_stopping else self._load.text
        if text != self._text:
            self._text = text
            self._send(status(text))

    def _send(self, *lines: str) -> None:
        if self._send_message is not None and lines:
            self._send_message("\n".join(lines))


_SOCKETS_MAX: Final = 16


def activation_sockets(
    environ: Mapping[str, str], pid: int, *, first_descriptor: int = 3
) -> tuple[socket.socket, ...]:
    """Take the listening TCP sockets meant for this process, if any; raises SettingsInvalid.

    Source: sd_listen_fds(3), SD_LISTEN_FDS_START.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return ()
    text = environ.get("LISTEN_FDS", "")
    count = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0
    if count > _SOCKETS_MAX:
        raise SettingsInvalid(
            f"the service manager passed {count} sockets; at most {_SOCKETS_MAX} are used",
            hint="remove lines ListenStream= of the .socket unit",
        )
    names = chain(environ.get("LISTEN_FDNAMES", "").split(":"), repeat("unknown"))
    descriptors = range(first_descriptor, first_descriptor + count)
    return tuple(_socket(*found) for found in zip(descriptors, names, strict=False))


def listen_address(sockets: Sequence[socket.socket]) -> str | None:
    """Return HOST:PORT of the sockets as `listen` under [proxy]; None without any.

    If several listen, it is an address that other machines can reach, because stricter rules apply
    there.
    """
    addresses = [socket.getsockname()[:2] for socket in sockets]
    open_first = sorted(addresses, key=lambda address: is_loopback(address[0]))
    found = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in open_first)
    return next(found, None)


def _socket(descriptor: int, name: str) -> socket.socket:
    os.set_inheritable(descriptor, False)  # noqa: FBT003 (positional only)
    with suppress(OSError):
        found = socket.socket(fileno=descriptor)
        is_ip = found.family in {socket.AF_INET, socket.AF_INET6}
        is_tcp = is_ip and found.type == socket.SOCK_STREAM
        if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return found
        found.detach()
    raise SettingsInvalid(
        f"descriptor {descriptor} ({name}) of the service manager is not a listening TCP socket",
        hint="the .socket unit needs ListenStream=ADDRESS:PORT and Accept=no",
    )


_VARIABLES: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES",
)  # fmt: skip


def take_service_environment(environ: MutableMapping[str, str] = os.environ) -> ServiceNotifier:
    """Read the variables and remove them for children; raises SettingsInvalid for a bad socket."""
    found = {name: value for name in _VARIABLES if (value := environ.pop(name, ""))}
    pid = os.getpid()
    sockets = activation_sockets(found, pid)
    return ServiceNotifier(open_notify_socket(found), watchdog_s(found, pid), sockets)
