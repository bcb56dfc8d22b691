"""The engine processes, as the record of usage sees them (supervisor.usage.recorder.Engines)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from proxy.router.slot_use import Tokens
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.fleet.fleet import Fleet
from supervisor.host.processor_load import process_s
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State

_TIMEOUT_S = 1.0


class UsageEngines:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def ready(self) -> Iterator[tuple[str, str, int]]:
        for replica in self._fleet.all_replicas():
            facts = replica.instance.snapshot()
            if facts.state is State.READY and facts.pid:
                yield facts.name, facts.model, facts.pid

    def pid(self, instance: str, /) -> int | None:
        facts = self._facts(instance)
        return facts.pid if facts else None

    def cpu_s(self, pid: int, /) -> float | None:
        return process_s(pid)

    async def counted(self, instance: str, /) -> Tokens | None:
        if (facts := self._facts(instance)) is None:
            return None
        try:
            async with (
                EngineClient(facts.endpoint, facts.api_key) as client,
                asyncio.timeout(_TIMEOUT_S),
            ):
                found = await client.metrics()
        except (TimeoutError, EngineUnreachable):
            return None
        if isinstance(found, ErrorResponse):
            return None
        names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
        return Tokens(*(int(found.get(name, 0)) for name in names))

    def _facts(self, instance: str) -> InstanceSnapshot | None:
        found = (one for one in self._fleet.all_replicas() if one.name == instance)
        return next((one.instance.snapshot() for one in found), None)
