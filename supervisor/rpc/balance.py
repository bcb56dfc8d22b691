"""Decides from measured times how many layers each shard of a split model should have.

The latency per layer is that of `ShardMetrics`; layers are given in inverse proportion to it. A
shard that also computes the output does more work than its layers, by `ShardMetrics.more_layers`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.rpc.shards import Share, apportion
from supervisor.settings.tables import LoadBalanceConfig

_NONE_YET: Final = 2**64 - 1
_UNLIMITED: Final = 2**31


@dataclass(slots=True)
class ShardMetrics:
    """Latencies of one shard; a forward is a pass of a batch of tokens through its layers."""

    shard_name: str
    layer_count: int
    total_forwards: int = 0
    total_latency_us: int = 0
    min_latency_us: int = _NONE_YET
    max_latency_us: int = 0
    last_latency_us: int = 0
    last_update: float | None = None  # monotonic seconds
    more_layers: float = 0.0  # its work besides its layers, in layers
    layers_max: int = _UNLIMITED  # how many its memory holds

    def record(self, latency_us: int) -> None:
        self.total_forwards += 1
        self.total_latency_us += latency_us
        self.min_latency_us = min(self.min_latency_us, latency_us)
        self.max_latency_us = max(self.max_latency_us, latency_us)
        self.last_latency_us = latency_us
        self.last_update = time.monotonic()

    @property
    def avg_latency_us(self) -> int:
        return self.total_latency_us // self.total_forwards if self.total_forwards else 0

    @property
    def avg_latency_per_layer_us(self) -> int:
        """The average latency divided by all its work, in layers."""
        work = self.layer_count + self.more_layers
        return int(self.avg_latency_us / work) if work else 0

    def expected_us(self, layers: int) -> float:
        """Return the expected latency with this number of layers."""
        return self.avg_latency_per_layer_us * (layers + self.more_layers)


# The speed-up that is worth reloading the model.
_WORTHWHILE: Final = 1.05

Assignments = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Balanced:
    """No layer is to be moved."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class InsufficientData:
    """A shard has not been measured often enough."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Layers are to be moved; both assignments are in the order of the shards."""

    reason: str
    current_assignments: Assignments
    suggested_assignments: Assignments
    # That of one stream of tokens: a token passes one shard after another, so this compares the
    # sums of their latencies.
    estimated_speedup: float = math.nan  # not a number: unknown
    # That of the slowest shard. It would be the speed-up if all shards always computed at the same
    # time, as with many streams in a pipeline.
    bottleneck_speedup: float = math.nan


RebalanceDecision = Balanced | Rebalance | InsufficientData


def is_measured(shards: Sequence[ShardMetrics], config: LoadBalanceConfig) -> bool:
    counts = [shard.total_forwards for shard in shards]
    return bool(counts) and min(counts) >= config.min_samples


def decide(shards: Sequence[ShardMetrics], config: LoadBalanceConfig) -> RebalanceDecision:
    """Decide from these measurements; `eval_interval_secs` does not matter."""
    if not is_measured(shards, config):
        if not shards:
            return InsufficientData("there are no shards")
        least = min(shards, key=lambda shard: shard.total_forwards)
        times = f"{least.total_forwards} times, less than {config.min_samples}"
        return InsufficientData(f"{least.shard_name} was measured {times}")
    if not (known := [*filter(None, (shard.avg_latency_per_layer_us for shard in shards))]):
        return Balanced("no shard takes a measurable time")
    ratio = max(known) / min(known)
    if ratio <= config.imbalance_threshold:
        return Balanced(
            f"the slowest shard takes {ratio:.2f} times as long per layer as the fastest one, "
            f"within {config.imbalance_threshold:.2f}"
        )
    return _rebalance(shards, ratio, config)


def _rebalance(
    shards: Sequence[ShardMetrics], ratio: float, config: LoadBalanceConfig
) -> RebalanceDecision:
    after = suggested_layers(shards)
    before_us = [shard.expected_us(shard.layer_count) for shard in shards]
    after_us = [shard.expected_us(count) for shard, count in zip(shards, after, strict=True)]
    speedup = sum(before_us) / sum(after_us)
    if speedup < _WORTHWHILE:
        return Balanced(f"moving layers would change the speed by {100 * (speedup - 1):+.1f} %")
    names, exceeds = [shard.shard_name for shard in shards], f"{config.imbalance_threshold:.2f}"
    return Rebalance(
        reason=f"per-layer latency ratio {ratio:.2f} exceeds threshold {exceeds}",
        current_assignments=tuple((shard.shard_name, shard.layer_count) for shard in shards),
        suggested_assignments=tuple(zip(names, after, strict=True)),
        estimated_speedup=speedup,
        bottleneck_speedup=max(before_us) / max(after_us),
    )


def suggested_layers(shards: Sequence[ShardMetrics]) -> tuple[int, ...]:
    """Return layers in inverse proportion to the latency per layer; at least one per shard.

    A shard without a measurable latency keeps its layers. A shard gets no more layers than its
    memory holds, unless it has them already.
    """
    timed = [shard for shard in shards if shard.avg_latency_per_layer_us > 0]
    work = sum(shard.layer_count + shard.more_layers for shard in timed)
    rate = work / sum(1 / shard.avg_latency_per_layer_us for shard in timed)

    def share(shard: ShardMetrics) -> Share:
        if shard.avg_latency_per_layer_us == 0:
            return shard.layer_count, shard.layer_count, shard.layer_count
        quota = rate / shard.avg_latency_per_layer_us - shard.more_layers
        return quota, min(1, shard.layer_count), max(shard.layer_count, shard.layers_max)

    return apportion(sum(shard.layer_count for shard in shards), [share(shard) for shard in shards])


class LoadBalancer:
    """Collects the metrics of shards, in the order in which they were registered.

    `shards` adds the limits of shards to their metrics, `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        config: LoadBalanceConfig,
        *,
        shards: Callable[[Sequence[ShardMetrics]], Sequence[ShardMetrics]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._shards = shards or (lambda metrics: metrics)
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
        """Decide at most once per `eval_interval_secs`; in between, the shards are balanced."""
        decision = self.advice()
        if isinstance(decision, InsufficientData):
            return decision
        now_s, last_s = self._clock(), self._last_eval_s
        if last_s is not None and int(now_s - last_s) < self._config.eval_interval_secs:
            return Balanced(f"decided {now_s - last_s:.0f} s ago")
        self._last_eval_s = now_s
        return decision

    def advice(self) -> RebalanceDecision:
        """Decide now; `eval_interval_secs` does not matter."""
        return decide(self._shards([*self._metrics.values()]), self._config)

    @property
    def metrics(self) -> Mapping[str, ShardMetrics]:
        return self._metrics

    def shard_metrics(self, name: str) -> ShardMetrics | None:
        return self._metrics.get(name)

    def reset(self) -> None:
        measured = [*self._metrics.values()]
        self.register_shards(
            [(shard.shard_name, shard.layer_count) for shard in measured],
            {shard.shard_name: shard.more_layers for shard in measured},
        )
        self._last_eval_s = None
