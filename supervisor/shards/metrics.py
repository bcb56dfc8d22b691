"""How long each shard of a split model takes for its layers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

_NONE_YET: Final = 2**64 - 1


@dataclass(slots=True)
class ShardMetrics:
    """Latencies of one shard; a forward is one pass of a batch of tokens through its layers.

    Attributes:
        more_layers: What it computes besides its layers, in layers.
    """

    shard_name: str
    layer_count: int
    total_forwards: int = 0
    total_latency_us: int = 0
    min_latency_us: int = _NONE_YET
    max_latency_us: int = 0
    last_latency_us: int = 0
    last_update: float | None = None  # monotonic seconds
    more_layers: float = 0.0

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
        """Of all that it computes."""
        work = self.layer_count + self.more_layers
        return int(self.avg_latency_us / work) if work else 0
