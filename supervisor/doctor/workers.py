"""Checks of RPC workers: whether each answers, and who can reach it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Final

from supervisor.control.messages import DaemonStatus, WorkerStatus
from supervisor.doctor.finding import Finding, failed
from supervisor.engines.discover import Engine
from supervisor.errors import CorralError
from supervisor.host.exposure import exposure
from supervisor.output import size
from supervisor.settings.schema import Settings
from supervisor.workers.address import UNPROTECTED, WorkerAddress, check_port
from supervisor.workers.known import KnownWorkers
from supervisor.workers.of_models import address_of
from supervisor.workers.probe import probe
from supervisor.workers.program import find

_TUNNEL: Final = "reach it through a tunnel (WireGuard, ssh -L), or at a private address"


def check_workers(
    settings: Settings, engine: Engine, status: DaemonStatus | None
) -> Iterator[Finding]:
    running = {one["name"]: one for one in status["workers"]} if status else {}
    for name, one in settings.workers.items():
        address = address_of(name, one, KnownWorkers())
        yield _local(address, engine, running) if one.local else _remote(address, engine, running)


def _local(address: WorkerAddress, engine: Engine, running: Mapping[str, WorkerStatus]) -> Finding:
    name = f"worker {address.name}"
    if found := running.get(address.name):
        return _running(name, found)
    try:
        program = find(engine)
        check_port(address)
    except CorralError as error:
        return failed(name, error)
    except OSError as error:
        text = f"cannot listen on {address}: {(error.strerror or str(error)).lower()}"
        return Finding(name, "fail", text, "set another port, or 0 for any")
    return Finding(name, "ok", f"starts with the daemon: {program.path}")


def _remote(address: WorkerAddress, engine: Engine, running: Mapping[str, WorkerStatus]) -> Finding:
    name, found = f"worker {address.name}", running.get(address.name)
    reached = _exposure(address.host)
    if reached in {"public", "every"}:
        text = f"{address} is a public address; {UNPROTECTED}"
        return Finding(name, "fail", text, _TUNNEL)
    # A worker that serves the daemon's engine answers no other connection.
    if found and found["state"] == "ready" and found["models"]:
        return _running(name, found)
    try:
        devices = probe(engine, address)
    except CorralError as error:
        return failed(name, error)
    memory = size(sum(one.total_mib for one in devices) * 1024**2)
    note = "; unencrypted, so the network must be trusted" if reached != "loopback" else ""
    return Finding(name, "ok", f"{address} answers: {memory}{note}")


def _running(name: str, found: WorkerStatus) -> Finding:
    if found["reason"]:
        return Finding(name, "fail", f"{found['state']}: {found['reason']}", found["hint"])
    used = f", for {', '.join(found['models'])}" if found["models"] else ""
    return Finding(name, "ok", f"{found['state']} at {found['address']}{used}")


def _exposure(host: str) -> str | None:
    try:
        return exposure(socket.gethostbyname(host))
    except (OSError, UnicodeError):  # the probe reports it
        return None
