"""What takes memory and processor time on this machine before a measurement."""

from __future__ import annotations

from typing import Final

from supervisor.bench.preconditions import LoadedModel, MachineFacts
from supervisor.control.client import Client
from supervisor.control.messages import ModelStatus
from supervisor.errors import CorralError
from supervisor.flags.plan import Plan
from supervisor.host import machine
from supervisor.host.busy_programs import busy_programs
from supervisor.host.paths import Directories
from supervisor.memory.fit import capacity
from supervisor.settings.schema import Settings

_WATCHED_S: Final = 0.5


def machine_facts(settings: Settings, plan: Plan, where: Directories) -> MachineFacts:
    """Watch the machine for a moment."""
    here = machine.read()
    return MachineFacts(
        capacity=capacity(here, plan.engine.devices, settings.supervisor.memory_budget),
        available_bytes=here.memory_available_bytes,
        logical_cores=here.logical_cores,
        programs=busy_programs(_WATCHED_S),
        loaded=_loaded(where),
    )


def _loaded(where: Directories) -> tuple[LoadedModel, ...]:
    try:
        models = Client(where.control_socket).status()["models"]
    except CorralError:
        return ()  # no daemon, or one that does not answer
    return tuple(found for one in models if (found := _loaded_model(one)))


def _loaded_model(model: ModelStatus) -> LoadedModel | None:
    pids = [one["pid"] for one in model["instances"] if one["pid"] is not None]
    if not pids:
        return None
    memory = [one["memory_bytes"] for one in model["instances"] if one["memory_bytes"] is not None]
    busy = sum(one["slots_busy"] for one in model["instances"])
    return LoadedModel(model["name"], sum(memory) if memory else None, busy, tuple(pids))
