"""The shards of one run of an instance: a relay and metrics for each worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from supervisor.settings.balance import LoadBalanceConfig
from supervisor.shards.balance import Shard
from supervisor.shards.balancer import LoadBalancer
from supervisor.shards.metrics import ShardMetrics
from supervisor.shards.plan import ShardPlan
from supervisor.shards.relay import Address, Relay
from supervisor.workers.address import WorkerAddress


class ShardRun:
    """Measures the shards of a run; listens in place of the workers as soon as it is made."""

    def __init__(self, plans: Sequence[ShardPlan], config: LoadBalanceConfig) -> None:
        self.plans = tuple(plans)
        self.balancer = LoadBalancer(config, shards=self._shards)
        self.balancer.register_shards(
            [(plan.worker.name, plan.layers) for plan in plans],
            {plan.worker.name: plan.more_layers for plan in plans},
        )
        self._relays = [self._relay(one.worker) for one in plans]

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Where the engine reaches the workers, in their order."""
        pairs = zip(self.plans, self._relays, strict=True)
        return tuple(
            replace(plan.worker, host=relay.address.host, port=relay.address.port)
            for plan, relay in pairs
        )

    def close(self) -> None:
        """Stop listening, if it was not served."""
        for one in self._relays:
            one.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Relay for the length of the block."""
        async with AsyncExitStack() as stack:
            for one in self._relays:
                await stack.enter_async_context(one.serve())
            yield

    def _relay(self, worker: WorkerAddress) -> Relay:
        def on_forward(latency_us: int) -> None:
            self.balancer.record(worker.name, latency_us)

        return Relay(Address(worker.host, worker.port), on_forward)

    def _shards(self, metrics: Sequence[ShardMetrics]) -> list[Shard]:
        return [
            Shard(found, plan.layers_max) for found, plan in zip(metrics, self.plans, strict=True)
        ]
