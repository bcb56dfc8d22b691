"""The workers that the daemon runs on this machine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Final

from attrs import define, field

from proxy.common.background_tasks import persist
from supervisor.builds.discover import Device, Engine
from supervisor.engine.launch import Launch
from supervisor.events import Emit, Part
from supervisor.rpc.address import KnownWorkers, WorkerAddress, probe
from supervisor.rpc.model_workers import address_of
from supervisor.rpc.worker import Worker, WorkerOptions, worker_launch
from supervisor.settings.load import Loaded
from supervisor.settings.tables import RestartPolicy, WorkerSettings
from supervisor.system.paths import Directories

_PROBE_LIMIT_S: Final = 1.0
_PAUSE_S: Final = 0.5


@define(eq=False, slots=False)
class WorkerPool(Part):
    """Runs the `[workers]` with `local = true`.

    `engine` finds the engine with the workers' program, or raises CorralError. `on_end` is called
    with the name of a worker that has ended and will be started again.
    """

    task = "workers"

    _known: KnownWorkers
    _engine: Callable[[], Engine]
    _directories: Directories
    _emit: Emit
    _on_end: Callable[[str], None] = lambda _: None
    _group: asyncio.TaskGroup | None = field(default=None, init=False)
    _settings: Mapping[str, WorkerSettings] = field(factory=dict, init=False)
    _policy: RestartPolicy = field(factory=RestartPolicy, init=False)
    _running: dict[str, tuple[Worker, asyncio.Task[None]]] = field(factory=dict, init=False)

    def worker(self, name: str) -> Worker | None:
        return self._running[name][0] if name in self._running else None

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            settings, self._settings = self._settings, {}
            self.apply(settings, self._policy, 0)
            await asyncio.get_running_loop().create_future()  # until cancelled

    def prepare(self, loaded: Loaded) -> Callable[[], None]:
        """Return the function that applies the workers of new settings."""
        settings, limits = loaded.settings.workers, loaded.settings.supervisor
        return functools.partial(self.apply, settings, limits.restart, limits.drain_timeout_s)

    def apply(
        self, settings: Mapping[str, WorkerSettings], policy: RestartPolicy, drain_s: float
    ) -> None:
        """Start new workers; retire removed or changed ones, which may serve for `drain_s`."""
        local = {name: table for name, table in settings.items() if table.local}
        before, self._settings, self._policy = self._settings, local, policy
        if self._group is None:
            return
        for name, table in before.items():
            if local.get(name) != table and name in self._running:
                self._group.create_task(_retire(*self._running.pop(name), drain_s))
        for name, table in local.items():
            if before.get(name) != table:
                worker = self._make(name, table, policy)
                run = persist("worker", worker.serve)
                self._running[name] = worker, self._group.create_task(run, name=f"worker {name}")

    def _make(self, name: str, settings: WorkerSettings, policy: RestartPolicy) -> Worker:
        address = address_of(name, settings, self._known)
        options = WorkerOptions(
            address.host, address.port, settings.threads, settings.device, settings.cache
        )
        return Worker(
            address,
            functools.partial(self._launch, name, options),
            functools.partial(self._probe, address),
            policy,
            self._emit,
            functools.partial(self._on_end, name),
        )

    def _launch(self, name: str, options: WorkerOptions) -> Launch:
        return worker_launch(self._engine(), name, options, self._directories)[0]

    def _probe(self, address: WorkerAddress) -> tuple[Device, ...]:
        devices = probe(self._engine(), address, _PROBE_LIMIT_S)
        self._known.note_devices(address, devices)
        return devices


async def _retire(worker: Worker, serving: asyncio.Task[None], drain_s: float) -> None:
    """End a worker once no engine uses it."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + drain_s
    while worker.is_used and loop.time() < until_s:  # noqa: ASYNC110 (only its output shows it)
        await asyncio.sleep(_PAUSE_S)
    serving.cancel()
