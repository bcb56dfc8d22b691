"""Reports the engine and the GPUs that models use to the proxy (proxy.models.EngineReader)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Final

from proxy.errors import Unavailable
from proxy.models import GpuUse
from supervisor.engines.runtime import runtime_metadata
from supervisor.errors import CorralError
from supervisor.fleet.fleet import Fleet
from supervisor.instance.states import State
from supervisor.memory.estimate import Estimate
from supervisor.proxy_adapter.redact import without_directories

# A worker on another machine is a device for the engine, whatever it computes with.
_REMOTE: Final = "RPC"


class EngineReaderAdapter:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def gpu_use(self, model: str) -> GpuUse:
        found = self._fleet.models.get(model)  # a reload may have removed it
        ready = [
            replica.plan.estimate
            for replica in (found.replicas if found else ())
            if replica.plan and replica.instance.snapshot().state is State.READY
        ]
        return gpu_use(ready)

    async def runtime(self) -> Mapping[str, object]:
        """Return what the engine of the settings is; runs it if its file is new.

        Raises:
            Unavailable: It does not run, or there is none.
        """
        try:
            engine = await asyncio.to_thread(self._fleet.planner.engine)
        except CorralError as error:
            message = without_directories("; ".join(filter(None, (error.message, error.hint))))
            raise Unavailable(message, retry_after_s=10) from error
        return asdict(runtime_metadata(engine))


def gpu_use(estimates: Iterable[Estimate]) -> GpuUse:
    """Return what instances with these estimates have on GPUs."""
    uses = [_use(one) for one in estimates]
    return GpuUse(
        layers=max((use.layers for use in uses), default=0),
        memory_bytes=sum(use.memory_bytes for use in uses),
        devices=tuple(dict.fromkeys(name for use in uses for name in use.devices)),
    )


def _use(estimate: Estimate) -> GpuUse:
    gpus = {
        name: memory
        for name, memory in estimate.devices.items()
        if not name.startswith(_REMOTE) and memory.total
    }
    weights = sum(memory.weights for memory in estimate.devices.values())
    ours = sum(memory.weights for memory in gpus.values())
    return GpuUse(
        layers=round(estimate.layers_offloaded * ours / weights) if weights else 0,
        memory_bytes=sum(memory.total for memory in gpus.values()),
        devices=tuple(gpus),
    )
