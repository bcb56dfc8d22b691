"""Status of RPC workers as control messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from supervisor.control.messages import WorkerStatus
from supervisor.engines.discover import Device
from supervisor.settings.schema import Settings
from supervisor.workers.address import WorkerAddress
from supervisor.workers.known import KnownWorkers
from supervisor.workers.of_models import address_of
from supervisor.workers.pool import WorkerPool
from supervisor.workers.worker import WorkerSnapshot


def worker_statuses(
    settings: Settings, known: KnownWorkers, pool: WorkerPool
) -> list[WorkerStatus]:
    models = _models(settings)
    found = []
    for name, one in settings.workers.items():
        address = address_of(name, one, known)
        worker = pool.worker(name)
        found.append(
            _local(worker.snapshot(), known.devices(address), models.get(name, []))
            if worker
            else _remote(address, known, models.get(name, []))
        )
    return found


def _models(settings: Settings) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for model, one in settings.models.items():
        for name in one.workers:
            found.setdefault(name, []).append(model)
    return found


def _local(worker: WorkerSnapshot, devices: Sequence[Device], models: list[str]) -> WorkerStatus:
    return {
        "name": worker.address.name,
        "address": str(worker.address),
        "local": True,
        "state": worker.state,
        "reason": worker.cause.sentence if worker.cause else None,
        "hint": worker.cause.hint if worker.cause else None,
        "pid": worker.pid,
        "restarts": worker.restarts,
        "devices_bytes": _bytes(devices),
        "models": models,
    }


def _remote(address: WorkerAddress, known: KnownWorkers, models: list[str]) -> WorkerStatus:
    problem, devices = known.problem(address), known.devices(address)
    return {
        "name": address.name,
        "address": str(address),
        "local": False,
        "state": "lost" if problem else "ready" if devices else "unknown",
        "reason": problem,
        "hint": None,
        "pid": None,
        "restarts": 0,
        "devices_bytes": _bytes(devices),
        "models": models,
    }


def _bytes(devices: Sequence[Device]) -> list[int]:
    return [one.total_mib * 1024**2 for one in devices]
