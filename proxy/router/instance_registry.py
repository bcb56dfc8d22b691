"""All instances by name: those in service, and those that still hold something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proxy.router.instances import Instance
from proxy.router.model_instances import ModelInstances
from proxy.router.response_progress import Clock
from proxy.upstream.rates import Rates
from proxy.upstream.upstream import Upstream


class Instances:
    """The instances of all models.

    Attributes:
        local: Those of this machine.
    """

    def __init__(self, clock: Clock, *, route_by_speed: bool) -> None:
        self._clock = clock
        self._route_by_speed = route_by_speed
        self._instances: dict[str, Instance] = {}
        self.local: list[Instance] = []
        self._by_model: dict[str, dict[str, Instance]] = {}
        self._of_model: dict[str, ModelInstances] = {}
        self._rates: dict[str, Rates] = {}  # of those that are out of service

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def of(self, model: str) -> ModelInstances:
        """Return those of a model that are in service; each change of them replaces its lists."""
        found = self._of_model.get(model)
        if found is None:
            found = ModelInstances((), self._clock, route_by_speed=self._route_by_speed)
            self._of_model[model] = found
        return found

    def in_service(self, model: str) -> Sequence[Instance]:
        return self.of(model).in_service

    def admit(self, upstream: Upstream, bit: int) -> Instance:
        """Take an instance into service; facts of an earlier admission are replaced.

        `bit` is that of the prefix index for its process.
        """
        rates = self._rates.get(upstream.name, Rates())
        instance = self._instances.setdefault(upstream.name, Instance(upstream, rates))
        before, instance.upstream = instance.upstream, upstream
        instance.in_service, instance.bit = True, bit
        self._by_model.get(before.model, {}).pop(upstream.name, None)
        self._by_model.setdefault(upstream.model, {})[upstream.name] = instance
        if before.node is None or upstream.node is None:
            self._collect_local()
        for model in {before.model, upstream.model}:
            self._collect(model)
        return instance

    def withdraw(self, instance: Instance) -> None:
        instance.in_service = False
        self._collect(instance.upstream.model)

    def set_silent(self, instance: Instance, *, is_silent: bool) -> None:
        instance.is_silent = is_silent
        self._collect(instance.upstream.model)

    def discard_if_unused(self, instance: Instance) -> None:
        """Forget an instance that is withdrawn and holds nothing; else do nothing."""
        if not (instance.in_service or instance.in_flight or instance.leases):
            self._rates[instance.upstream.name] = instance.rates
            if self._instances.pop(instance.upstream.name, None):
                self._by_model[instance.upstream.model].pop(instance.upstream.name)
                if instance.upstream.node is None:
                    self._collect_local()

    def _collect_local(self) -> None:
        self.local = [one for one in self if one.upstream.node is None]

    def _collect(self, model: str) -> None:
        found = self._by_model.get(model, {}).values()
        members = [instance for instance in found if instance.in_service]
        self._of_model[model] = ModelInstances(
            members, self._clock, route_by_speed=self._route_by_speed
        )

    def forget(self, name: str) -> None:
        """Forget the speed of an instance that is out of service."""
        self._rates.pop(name, None)
