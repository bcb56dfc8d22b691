"""What is known of the workers of a model that a command plans."""

from __future__ import annotations

import asyncio

from supervisor.control.client import Client
from supervisor.control.messages import WorkerStatus
from supervisor.engines.discover import Device
from supervisor.errors import CorralError
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.workers.known import KnownWorkers


def see_workers(
    known: KnownWorkers, planner: LaunchPlanner, model: str, where: Directories
) -> None:
    """Note what a running daemon knows of workers; without a daemon, ask those of a model.

    A worker that serves the daemon's engine would not answer.
    """
    if not planner.workers.addresses_of(model):
        return
    try:
        statuses = Client(where.control_socket).status()["workers"]
    except CorralError:
        asyncio.run(planner.workers.look(model, planner.engine_of(planner.entry(model))))
        return
    for one in statuses:
        _note(known, planner, one)


def _note(known: KnownWorkers, planner: LaunchPlanner, worker: WorkerStatus) -> None:
    if not planner.workers.is_configured(worker["name"]):
        return
    if worker["local"]:
        known.note_port(worker["name"], int(worker["address"].rpartition(":")[2]))
    address = planner.workers.address(worker["name"])
    if str(address) != worker["address"]:
        return
    if worker["devices_bytes"]:
        devices = (Device("RPC", str(address), one >> 20) for one in worker["devices_bytes"])
        known.note_devices(address, tuple(devices))
    if worker["reason"]:
        known.note_problem(address, worker["reason"])
