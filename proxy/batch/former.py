"""When requests that gather become a batch. Pure.

The engine batches whatever runs at once, so what a batch decides is when its requests begin:
together, that their prompts share the engine's passes. Fewer than a batch run singly, without
waiting for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.batch_config import BatchConfig


@dataclass(frozen=True, slots=True)
class Formed:
    """The requests that begin now, the oldest of those that gather.

    Attributes:
        is_batch: Together; otherwise they are too few for that.
    """

    size: int
    is_batch: bool


@dataclass(frozen=True, slots=True)
class Gathering:
    """They wait for more, so long unless more arrive."""

    wait_ms: float


def form(config: BatchConfig, waiting: int, waited_ms: float) -> Formed | Gathering | None:
    """Decide what requests that gather do now; None where there is none.

    Args:
        config: The limits.
        waiting: How many gather.
        waited_ms: How long the oldest has.
    """
    if not waiting:
        return None
    if not config.should_process(waiting) and waited_ms < config.window_ms:
        return Gathering(config.window_ms - waited_ms)
    size = min(waiting, config.max_batch)
    return Formed(size, config.meets_minimum(size))
