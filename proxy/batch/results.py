"""The results and figures of a batch. Pure.

Names are those of realizar 0.8.5: `GpuBatchResult`, `ContinuousBatchResponse` and `GpuBatchStats`.
The result of a prompt that failed also has `error`, in the shape of every error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from proxy.batch.requests import OwnAnswer, refusal
from proxy.errors import UpstreamFailed


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The answer to one prompt.

    Attributes:
        index: Of the prompt, from 0.
        token_ids: Generated, one that ended the text included.
        num_generated: Their number.
        batched: Whether the prompt began with others as a batch.
        batch_size: Prompts that began together; 1 for a prompt that ran singly.
        latency_ms: From joining the queue to the whole answer.
        error: Why there is no answer.
    """

    index: int
    token_ids: Sequence[int] = ()
    text: str = ""
    num_generated: int = 0
    batched: bool = False
    batch_size: int = 1
    latency_ms: float = 0.0
    error: Mapping[str, Any] | None = None

    def json(self) -> bytes:
        members = asdict(self)
        if self.error is None:
            del members["error"]
        return orjson.dumps(members)


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The figures of one batch.

    Attributes:
        batch_size: Prompts.
        gpu_used: Whether an engine that answered has layers on a GPU; those of other machines count
            as without.
        total_tokens: Generated.
    """

    batch_size: int
    gpu_used: bool
    total_tokens: int
    processing_time_ms: float
    throughput_tps: float


def result_of(index: int, answer: OwnAnswer, path: str) -> BatchResult:
    """Return the result of a prompt; `path` is that of the endpoint that answered."""
    try:
        said = orjson.loads(answer.body)
        if answer.status >= 400:
            return BatchResult(index, error=said["error"])
        return BatchResult(index, said["tokens"], said["content"], len(said["tokens"]))
    except (ValueError, LookupError, TypeError) as error:
        failure = UpstreamFailed(f"the answer to prompt {index} has another format: {error!r}")
        return result_of(index, refusal(path, failure), path)


def stats_of(
    batch_size: int, total_tokens: int, duration_s: float, *, gpu_used: bool
) -> BatchStats:
    return BatchStats(
        batch_size=batch_size,
        gpu_used=gpu_used,
        total_tokens=total_tokens,
        processing_time_ms=round(duration_s * 1000, 3),
        throughput_tps=round(total_tokens / duration_s, 3) if duration_s > 0 else 0.0,
    )
