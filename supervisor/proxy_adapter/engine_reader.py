"""Reports the engine and the GPUs that models use to the proxy (proxy.models.EngineReader)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict

from proxy.errors import Unavailable
from proxy.models import GpuUse
from supervisor.engines.runtime import runtime_metadata
from supervisor.errors import CorralError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.gpu_use import gpu_use
from supervisor.instance.states import State
from supervisor.proxy_adapter.redact import without_directories


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
