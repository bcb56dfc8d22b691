"""Keeps the measurements of one split model, and evaluates them from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from supervisor.settings.balance import LoadBalanceConfig
from supervisor.shards.balance import (
    Balanced,
    InsufficientData,
    RebalanceDecision,
    Shard,
    decide,
)
from supervisor.shards.metrics import ShardMetrics


class LoadBalancer:
    """Collects the metrics of shards, in the order in which they were registered.

    Args:
        shards: Adds to metrics what limits their shards.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: LoadBalanceConfig,
        *,
        shards: Callable[[Sequence[ShardMetrics]], Sequence[Shard]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._shards = shards or _unlimited
        self._clock = clock
        self._metrics: dict[str, ShardMetrics] = {}
        self._last_eval_s: float | None = None

    def register_shards(
        self,
        shards: Iterable[tuple[str, int]],
        more_layers: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Add shards by name, each with its number of layers; `more_layers` as in ShardMetrics."""
        for name, layer_count in shards:
            found = ShardMetrics(name, layer_count, more_layers=more_layers.get(name, 0.0))
            self._metrics[name] = found

    def record(self, shard_name: str, latency_us: int) -> None:
        if found := self._metrics.get(shard_name):
            found.record(latency_us)

    def evaluate(self) -> RebalanceDecision:
        """Decide; balanced for `eval_interval_secs` after a decision."""
        decision = self.advice()
        if isinstance(decision, InsufficientData):
            return decision
        now_s, last_s = self._clock(), self._last_eval_s
        if last_s is not None and int(now_s - last_s) < self._config.eval_interval_secs:
            return Balanced(f"decided {now_s - last_s:.0f} s ago")
        self._last_eval_s = now_s
        return decision

    def advice(self) -> RebalanceDecision:
        """Decide, whenever it was decided before."""
        return decide(self._shards([*self._metrics.values()]), self._config)

    @property
    def metrics(self) -> Mapping[str, ShardMetrics]:
        return self._metrics

    def shard_metrics(self, name: str) -> ShardMetrics | None:
        return self._metrics.get(name)

    def reset(self) -> None:
        """Forget all measurements, as after layers were moved."""
        measured = [*self._metrics.values()]
        self.register_shards(
            [(shard.shard_name, shard.layer_count) for shard in measured],
            {shard.shard_name: shard.more_layers for shard in measured},
        )
        self._last_eval_s = None


def _unlimited(metrics: Sequence[ShardMetrics]) -> Sequence[Shard]:
    return [Shard(one) for one in metrics]
