"""The JSON of the daemon and its commands about where the layers of a model are."""

from __future__ import annotations

from typing import TypedDict


class ShardStatus(TypedDict):
    """One worker of a split model, since the model was loaded; `last_update` is ISO 8601 in UTC.

    `layers_max`: how many its memory holds. `suggested_layers`: None where nothing is to be moved.
    `has_output`: it also computes the output, which is not in `layer_count`.
    """

    shard_name: str
    layer_count: int
    has_output: bool
    layers_max: int | None
    suggested_layers: int | None
    total_forwards: int
    total_latency_us: int
    min_latency_us: int | None
    max_latency_us: int
    last_latency_us: int
    last_update: str | None
    avg_latency_us: int
    avg_latency_per_layer_us: int


class BalanceStatus(TypedDict):
    """`decision`: balanced, insufficient_data or rebalance.

    `estimated_speedup`: of one stream; `bottleneck_speedup`: of the slowest worker alone.
    """

    model: str
    instance: str
    decision: str
    reason: str
    estimated_speedup: float | None
    bottleneck_speedup: float | None
    shards: list[ShardStatus]


class MovedLayers(TypedDict):
    """Layers by worker, before and after they were moved; `file` keeps them.

    `estimated_speedup`: None where they were moved back.
    """

    model: str
    before: dict[str, int]
    after: dict[str, int]
    reason: str
    estimated_speedup: float | None
    file: str
