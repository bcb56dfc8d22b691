"""Clients' demand for a model."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.prompt_cache.index import PrefixIndex
from proxy.router.instance_registry import Instances
from proxy.router.model_queue import ModelQueue


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Clients' demand for a model on this machine.

    Attributes:
        working: Requests that its instances hold.
        idle_since_s: When the last of them ended; minus infinity before the first.
        cached_tokens: Tokens of conversations in its slots, as far as known.
        held: Those of the waiting that more slots would not help: another prompt comes first.
    """

    waiting: int
    working: int
    idle_since_s: float
    cached_tokens: int
    held: int = 0


def demand_of(queue: ModelQueue, instances: Instances, prefix_index: PrefixIndex) -> ModelDemand:
    waiting = queue.stats()
    cached = sum(
        prefix_index.slot_map(instance.upstream.name).tokens
        for instance in instances.in_service(queue.model)
    )
    return ModelDemand(
        waiting.interactive + waiting.batch,
        queue.in_flight,
        queue.ended_at_s,
        cached,
        queue.held,
    )
