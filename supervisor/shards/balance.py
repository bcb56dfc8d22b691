"""Decides how many layers each shard of a split model should have. Pure.

Latencies per layer are those of `ShardMetrics`, and layers are given in inverse proportion to them.
A shard that also computes the output does more than its layers: `ShardMetrics.more_layers` says how
much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.settings.balance import LoadBalanceConfig
from supervisor.shards.apportion import Share, apportion
from supervisor.shards.metrics import ShardMetrics

# A change reloads the model; it must be worth that.
_WORTHWHILE: Final = 1.05
_UNLIMITED: Final = 2**31

Assignments = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """The measurements of a shard, and what limits it.

    Attributes:
        layers_max: How many its memory holds.
    """

    metrics: ShardMetrics
    layers_max: int = _UNLIMITED

    @property
    def name(self) -> str:
        return self.metrics.shard_name

    @property
    def layers(self) -> int:
        return self.metrics.layer_count

    @property
    def per_layer_us(self) -> int:
        return self.metrics.avg_latency_per_layer_us

    def latency_us(self, layers: int) -> float:
        """The expected latency with this number of layers."""
        return self.per_layer_us * (layers + self.metrics.more_layers)


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
    """Layers are to be moved; both assignments are in the order of the shards.

    Attributes:
        estimated_speedup: Of one stream of tokens: a token passes one shard after another, so the
            sums of their latencies are compared.
        bottleneck_speedup: Of the slowest shard alone. It would be the speed-up if all shards
            always computed at once, as with many streams in a pipeline.
    """

    reason: str
    current_assignments: Assignments
    suggested_assignments: Assignments
    estimated_speedup: float
    bottleneck_speedup: float


RebalanceDecision = Balanced | Rebalance | InsufficientData


def is_measured(shards: Sequence[Shard], config: LoadBalanceConfig) -> bool:
    """Whether every shard has been measured often enough."""
    counts = [one.metrics.total_forwards for one in shards]
    return bool(counts) and min(counts) >= config.min_samples


def decide(shards: Sequence[Shard], config: LoadBalanceConfig) -> RebalanceDecision:
    """Decide from these measurements alone, whenever it was decided before."""
    if not is_measured(shards, config):
        return InsufficientData(_what_is_missing(shards, config))
    known = [one.per_layer_us for one in shards if one.per_layer_us > 0]
    if not known:
        return Balanced("no shard takes a measurable time")
    ratio = max(known) / min(known)
    if ratio <= config.imbalance_threshold:
        return Balanced(
            f"the slowest shard takes {ratio:.2f} times as long per layer as the fastest one, "
            f"within {config.imbalance_threshold:.2f}"
        )
    return _rebalance(shards, ratio, config)


def _what_is_missing(shards: Sequence[Shard], config: LoadBalanceConfig) -> str:
    if not shards:
        return "there are no shards"
    least = min(shards, key=lambda one: one.metrics.total_forwards)
    return (
        f"{least.name} was measured {least.metrics.total_forwards} times, "
        f"less than {config.min_samples}"
    )


def _rebalance(
    shards: Sequence[Shard], ratio: float, config: LoadBalanceConfig
) -> RebalanceDecision:
    after = suggested_layers(shards)
    before_us = [one.latency_us(one.layers) for one in shards]
    after_us = [one.latency_us(count) for one, count in zip(shards, after, strict=True)]
    speedup = sum(before_us) / sum(after_us)
    if speedup < _WORTHWHILE:
        return Balanced(f"moving layers would change the speed by {100 * (speedup - 1):+.1f} %")
    return Rebalance(
        reason=f"per-layer latency ratio {ratio:.2f} exceeds threshold "
        f"{config.imbalance_threshold:.2f}",
        current_assignments=tuple((one.name, one.layers) for one in shards),
        suggested_assignments=tuple(
            (one.name, count) for one, count in zip(shards, after, strict=True)
        ),
        estimated_speedup=speedup,
        bottleneck_speedup=max(before_us) / max(after_us),
    )


def suggested_layers(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return layers in inverse proportion to the latency per layer; at least one each.

    A shard without a measurable latency keeps its layers. None gets more than its memory holds,
    unless it has them already.
    """
    timed = [one for one in shards if one.per_layer_us > 0]
    work = sum(one.layers + one.metrics.more_layers for one in timed)
    rate = work / sum(1 / one.per_layer_us for one in timed)

    def share(one: Shard) -> Share:
        if one.per_layer_us == 0:
            return Share(one.layers, one.layers, one.layers)
        quota = rate / one.per_layer_us - one.metrics.more_layers
        return Share(quota, min(1, one.layers), max(one.layers, one.layers_max))

    return apportion(sum(one.layers for one in shards), [share(one) for one in shards])
