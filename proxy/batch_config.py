"""`[proxy.batch]`: how batch requests gather.

Names and values of `BatchConfig` are those of realizar 0.8.5, `BatchConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from proxy.config.types import SettingsTable

_REQUESTS_MAX = 100_000
_Requests = Annotated[int | None, Field(ge=1, le=_REQUESTS_MAX)]


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How batch requests gather.

    Attributes:
        window_ms: The longest that the first of them waits for more.
        min_batch: Fewer run singly.
        optimal_batch: So many do not wait for more.
        max_batch: The most of one batch.
        queue_size: The most that wait for their turn, of a client and one model.
        gpu_threshold: For clients; llama-server computes on its GPU whatever the batch.
    """

    window_ms: int = 50
    min_batch: int = 4
    optimal_batch: int = 32
    max_batch: int = 64
    queue_size: int = 1024
    gpu_threshold: int = 32

    @classmethod
    def low_latency(cls) -> Self:
        return cls(5, 2, 8, 16, 512, 32)

    @classmethod
    def high_throughput(cls) -> Self:
        return cls(100, 8, 32, 128, 2048, 32)

    def should_process(self, batch_size: int) -> bool:
        """Return whether so many requests wait for no more."""
        return batch_size >= self.optimal_batch

    def meets_minimum(self, batch_size: int) -> bool:
        """Return whether so many requests are a batch."""
        return batch_size >= self.min_batch


class BatchSettings(SettingsTable):
    """`[proxy.batch]`: how requests of priority batch gather."""

    preset: Literal["default", "low_latency", "high_throughput"] = Field(
        "default", description="values of those below that are not set"
    )
    window_ms: int | None = Field(
        None,
        ge=0,
        le=60_000,
        description="milliseconds that a batch request waits for others; unset: 50, 5 or 100 by "
        "the preset",
    )
    min_batch: _Requests = Field(
        None, description="fewer requests run singly; unset: 4, 2 or 8 by the preset"
    )
    optimal_batch: _Requests = Field(
        None, description="so many requests wait for no more; unset: 32, 8 or 32 by the preset"
    )
    max_batch: _Requests = Field(
        None, description="most requests of one batch; unset: 64, 16 or 128 by the preset"
    )
    queue_size: _Requests = Field(
        None,
        description="batch requests of a client for one model that may wait, and prompts of one "
        "request; more get 429; unset: 1024, 512 or 2048 by the preset",
    )
    gpu_threshold: _Requests = Field(
        None,
        description="batch_threshold of /v1/gpu/status; an engine uses its GPU for batches of any "
        "size; unset: 32",
    )

    @property
    def config(self) -> BatchConfig:
        presets = {
            "default": BatchConfig,
            "low_latency": BatchConfig.low_latency,
            "high_throughput": BatchConfig.high_throughput,
        }
        names = BatchConfig.__slots__
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(presets[self.preset](), **given)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        least, most = self.config.min_batch, self.config.max_batch
        if least > most:
            raise ValueError(f"min_batch ({least}) is more than max_batch ({most})")
        return self
