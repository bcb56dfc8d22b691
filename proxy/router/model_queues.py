"""The queues of all models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.prompt_cache.index import PrefixIndex
from proxy.router.instance_registry import Instances
from proxy.router.model_queue import ModelQueue
from proxy.router.request_queue import QueueStats
from proxy.router.response_progress import Clock
from proxy.settings import ProxySettings


class ModelQueues:
    def __init__(
        self,
        instances: Instances,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        clock: Clock,
        on_idle: Callable[[], None],
    ) -> None:
        self.instances = instances
        self.prefix_index = prefix_index
        self._settings = settings
        self.clock = clock
        self._on_idle = on_idle
        self._queues: dict[str, ModelQueue] = {}

    def of(self, model: str) -> ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(
                model,
                self.instances,
                self.prefix_index,
                self._settings,
                self.clock,
                self._on_idle,
            )
        return queue

    def assign_slots(self, model: str) -> None:
        self.of(model).assign_slots()

    def positions(self) -> dict[tuple[str, str], int]:
        """Return the place of each waiting request in its queue by its client and id, from 1."""
        return {
            one: position
            for queue in self._queues.values()
            for one, position in queue.positions().items()
        }

    def stats(self) -> Mapping[str, QueueStats]:
        return {model: queue.stats() for model, queue in self._queues.items()}
