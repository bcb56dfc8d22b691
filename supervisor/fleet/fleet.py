"""Many instances, by the names of their models.

The fleet turns a word about models (start, stop, restart) into words about instances, and knows
when that is over. It decides nothing about one instance: that is life/lifecycle.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from supervisor.errors import SettingsInvalid
from supervisor.events import Emit
from supervisor.fleet.workshop import Workshop
from supervisor.life.facts import InstanceFacts, Limits
from supervisor.life.instance import Instance
from supervisor.life.launch import Launch
from supervisor.life.lifecycle import State
from supervisor.life.restart import Policy
from supervisor.life.traffic import Traffic
from supervisor.profile.plan import ModelEntry, Plan

# A start is over when the instance serves, or when whoever waits should hear why it does not:
# in BACKOFF it will be tried again, but the cause of the first failure is known.
_START_OVER: Final = frozenset({State.READY, State.FAILED, State.BACKOFF, State.STOPPED})


class Model:
    """One configured model and its instances.

    Attributes:
        entry: What the settings say of it.
        plan: What its latest run was started with, or None before the first.
        instances: Its replicas, `NAME.0` and up.
    """

    def __init__(self, entry: ModelEntry, workshop: Workshop) -> None:
        self.entry = entry
        self.plan: Plan | None = None
        self.instances: tuple[Instance, ...] = ()
        self._workshop = workshop

    def launch(self, instance: str, _run: int) -> Launch:
        """Plan and launch a run of an instance; blocks for some milliseconds of file reading."""
        self.plan = self._workshop.plan(self.entry.name)
        return self._workshop.launch(self.plan, instance)


class Fleet:
    """Every instance of every model."""

    def __init__(self, workshop: Workshop, traffic: Traffic, emit: Emit, limits: Limits) -> None:
        self._workshop = workshop
        self.models: Mapping[str, Model] = {
            name: Model(entry, workshop) for name, entry in workshop.entries.items()
        }
        for model in self.models.values():
            model.instances = tuple(_instances(model, traffic, emit, limits))

    async def serve(self) -> None:
        """Run every instance's life, until cancelled; then kill what is left."""
        async with asyncio.TaskGroup() as lives:
            for instance in self.instances():
                lives.create_task(instance.serve())

    def instances(self, names: Sequence[str] = ()) -> Iterator[Instance]:
        """Yield the instances of the named models, or of all.

        Raises:
            NoSuchModel: A name is not configured.
        """
        for name in names or self.models:
            yield from self.models[self._workshop.entry(name).name].instances

    def command(self, verb: str, names: Sequence[str] = ()) -> Callable[[], bool]:
        """Begin to start, stop or restart models; return what tells whether that is over.

        Raises:
            NoSuchModel: A name is not configured; nothing was begun.
            SettingsInvalid: The verb is none of these.
        """
        instances = tuple(self.instances(names))
        if verb == "stop":
            return _begin(instances, Instance.stop, lambda now, _: now.state is State.STOPPED)
        if verb == "start":
            return _begin(instances, Instance.start, lambda now, _: now.state in _START_OVER)
        if verb == "restart":
            return _begin(instances, Instance.restart, _restarted)
        raise SettingsInvalid(f"no command is named {verb!r}")

    async def all_in(self, states: frozenset[State], names: Sequence[str] = ()) -> None:
        """Wait until each instance of the named models, or of all, was in one of the states."""
        for instance in self.instances(names):
            await instance.wait(states)


def _instances(model: Model, traffic: Traffic, emit: Emit, limits: Limits) -> Iterator[Instance]:
    for replica in range(model.entry.replicas):
        name = f"{model.entry.name}.{replica}"
        yield Instance(
            name=name,
            model=model.entry.name,
            launch=functools.partial(model.launch, name),
            limits=limits,
            policy=Policy(),
            traffic=traffic,
            emit=emit,
        )


def _begin(
    instances: Sequence[Instance],
    tell: Callable[[Instance], None],
    is_over: Callable[[InstanceFacts, InstanceFacts], bool],
) -> Callable[[], bool]:
    before = [instance.snapshot() for instance in instances]
    for instance in instances:
        tell(instance)
    return lambda: all(
        is_over(instance.snapshot(), was) for instance, was in zip(instances, before, strict=True)
    )


def _restarted(now: InstanceFacts, before: InstanceFacts) -> bool:
    return now.state in _START_OVER and now.run > before.run
