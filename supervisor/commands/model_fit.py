"""Whether a model that is not here yet would fit, by the estimate of `corral plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from supervisor.engines.discover import Engine
from supervisor.errors import EngineBroken, EngineMissing
from supervisor.flags.plan import ModelEntry, Plan, make_plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.gguf.metadata import Gguf
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories
from supervisor.hub import file_names
from supervisor.memory.fit import MemoryCapacity, capacity, misfit_reason
from supervisor.output import size
from supervisor.settings.load import load


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model would take at its start.

    Attributes:
        text: A clause on its memory.
        misfit: Why it can never fit, as a clause; None if it can.
    """

    text: str
    misfit: str | None


class MachineFit:
    """This machine, with the engine and the memory that the settings give to models."""

    def __init__(self, where: Directories) -> None:
        settings = load(None, config_dir=where.config, overrides={}).settings
        self._planner = LaunchPlanner(settings, where)
        self._budget_bytes = settings.supervisor.memory_budget
        self._engine = _engine(self._planner)
        self.room = self._room()

    @property
    def most_bytes(self) -> int:
        """Memory that no model can exceed."""
        return self.room.host + sum(self.room.devices.values())

    def of(self, model: Gguf, projector_bytes: int) -> Fit:
        """Plan a model under the default profile; raises SettingsInvalid."""
        if self._engine is None:
            return self._by_size(model.size_bytes + projector_bytes)
        entry = ModelEntry(file_names.model_name(model.path.name), model.path)
        profile = self._planner.tuned_profiles.profile(entry)
        plan = make_plan(
            entry,
            profile,
            self._engine,
            model,
            self._machine(),
            instances=1,
            projector_bytes=projector_bytes,
        )
        return Fit(_text(plan, self.room), misfit_reason(plan.estimate, self.room))

    def _by_size(self, size_bytes: int) -> Fit:
        misfit = (
            f"its files have {size(size_bytes)}, but models may use {size(self.room.host)}"
            if size_bytes > self.room.host
            else None
        )
        return Fit("no engine is here, so only the size of its files was compared", misfit)

    def _machine(self) -> Machine:
        here = machine.read()
        most_bytes = min(self._budget_bytes or here.memory_bytes, here.memory_bytes)
        return replace(here, memory_bytes=most_bytes)

    def _room(self) -> MemoryCapacity:
        if self._engine:
            return self._planner.capacity(self._engine)
        return capacity(machine.read(), (), self._budget_bytes)


def _engine(planner: LaunchPlanner) -> Engine | None:
    try:
        return planner.engine()
    except (EngineMissing, EngineBroken):
        return None


def _text(plan: Plan, room: MemoryCapacity) -> str:
    """Such as `needs 5.1 GiB of 15.2 GiB main memory with 2 slots of 8,192 tokens`."""
    needs = plan.estimate.host.at_start
    parts = [f"{size(needs)} of {size(room.host)} main memory"]
    parts += [
        f"{size(take.at_start)} of {size(room.devices.get(name, 0))} on {name}"
        for name, take in plan.estimate.devices.items()
    ]
    context = f" with {plan.ctx_size:,} tokens of context" if plan.ctx_size else ""
    return f"needs {' and '.join(parts)}{context}"
