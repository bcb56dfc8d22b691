"""The workers of each model, under one version of the settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from supervisor.builds.discover import Device, Engine
from supervisor.errors import CorralError, WorkerUnreachable
from supervisor.plan.resolve import RpcWorker
from supervisor.rpc.address import LOOPBACK, KnownWorkers, WorkerAddress, probe
from supervisor.settings.schema import Settings
from supervisor.settings.tables import WorkerSettings
from supervisor.system.machine import Machine

# A worker may not listen yet: local ones start with the daemon, and any may be restarting.
_LOCAL_START_S: Final = 5.0
_REMOTE_START_S: Final = 1.0
_PAUSE_S: Final = 0.1
_MIB: Final = 1024**2


class ModelWorkers:
    def __init__(self, settings: Settings, known: KnownWorkers) -> None:
        self._settings = settings
        self._known = known

    def address(self, name: str) -> WorkerAddress:
        return address_of(name, self._settings.workers[name], self._known)

    def is_configured(self, name: str) -> bool:
        return name in self._settings.workers

    def addresses(self, model: str) -> tuple[WorkerAddress, ...]:
        """Return the workers that compute for a model now, in the order of its settings."""
        return tuple(
            address for address in self.addresses_of(model) if not self._is_left_out(model, address)
        )

    def loss_notes(self, model: str) -> tuple[str, ...]:
        """Return a sentence for each lost worker of a model."""
        return tuple(
            f"{self._known.problem(address)}; {model} runs without it until its next start"
            for address in self.addresses_of(model)
            if self._is_left_out(model, address)
        )

    def used_by(self, model: str, engine: Engine, here: Machine) -> tuple[RpcWorker, ...]:
        """Return `addresses` with devices; unknown memory is assumed to be that of this machine."""
        return tuple(
            RpcWorker(address.name, str(address), tuple(self._devices(address, engine, here)))
            for address in self.addresses(model)
        )

    def assumption_notes(self, model: str) -> tuple[str, ...]:
        """Return a sentence for each worker of unknown memory."""
        return tuple(
            f"the memory of worker {worker.name} is not known, and assumed to be as on this machine"
            for worker in self.addresses(model)
            if not self._is_local(worker.name) and not self._known.devices(worker)
        )

    def fingerprint(self, model: str) -> tuple[str, ...]:
        """Return the inputs of the command line from the settings of workers."""
        return tuple(f"{name} {self._settings.workers[name]!r}" for name in self._names(model))

    async def ask(self, model: str, engine: Engine) -> tuple[str, ...]:
        """Probe the workers of a model before it starts; return `loss_notes`.

        Raises WorkerMismatch, and WorkerUnreachable if the model waits for a worker without an
        answer.
        """
        for error in await self._ask_all(engine, self.addresses_of(model)):
            if not (isinstance(error, WorkerUnreachable) and self._is_optional(model)):
                raise error
        return self.loss_notes(model)

    async def probe_remote(self, model: str, engine: Engine) -> None:
        """Probe the workers on other machines, for a command that only shows a plan."""
        addresses = self.addresses_of(model)
        remote = (address for address in addresses if not self._is_local(address.name))
        await self._ask_all(engine, remote)

    async def _ask_all(
        self, engine: Engine, addresses: Iterable[WorkerAddress]
    ) -> list[CorralError]:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(engine, address)) for address in addresses]
        return [error for task in asked if (error := task.result())]

    async def _ask(self, engine: Engine, address: WorkerAddress) -> CorralError | None:
        """Note the answer of a worker; return an error if it does not answer."""
        limit_s = _LOCAL_START_S if self._is_local(address.name) else _REMOTE_START_S
        until_s = time.monotonic() + limit_s
        while True:
            try:
                devices = await asyncio.to_thread(probe, engine, address)
            except CorralError as error:
                if time.monotonic() >= until_s:
                    self._known.note_problem(address, error.message)
                    return error
            else:
                self._known.note_devices(address, devices)
                return None
            await asyncio.sleep(_PAUSE_S)

    def addresses_of(self, model: str) -> tuple[WorkerAddress, ...]:
        """Return all workers of a model, in the order of its settings."""
        return tuple(map(self.address, self._names(model)))

    def _names(self, model: str) -> tuple[str, ...]:
        found = self._settings.models.get(model)
        return found.workers if found else ()

    def _is_optional(self, model: str) -> bool:
        return self._settings.models[model].on_worker_loss == "without"

    def _is_left_out(self, model: str, address: WorkerAddress) -> bool:
        return self._is_optional(model) and self._known.problem(address) is not None

    def _is_local(self, name: str) -> bool:
        return self._settings.workers[name].local

    def _devices(self, address: WorkerAddress, engine: Engine, here: Machine) -> Iterator[Device]:
        settings = self._settings.workers[address.name]
        assumed = Device("RPC", str(address), here.memory_bytes // _MIB)
        found = self._known.devices(address) or (assumed,)
        limit = settings.memory // _MIB // len(found) if settings.memory else None
        for device in found:
            yield replace(
                device,
                total_mib=limit or device.total_mib,
                free_mib=min(limit, device.free_mib)
                if limit and device.free_mib
                else device.free_mib,
                is_main_memory=settings.local
                and (settings.device == "CPU" or not any(gpu.total_mib for gpu in engine.devices)),
            )


def address_of(name: str, settings: WorkerSettings, known: KnownWorkers) -> WorkerAddress:
    if settings.address is None:
        return WorkerAddress(name, LOOPBACK, settings.port or known.port(name))
    host, _, port = settings.address.rpartition(":")
    return WorkerAddress(name, host, int(port))
