"""Which workloads suit a model."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.bench.workloads.registry import WORKLOADS
from supervisor.bench.workloads.workload import Workload
from supervisor.engines.help import nearest
from supervisor.errors import SettingsInvalid
from supervisor.flags.plan import Plan
from supervisor.host.paths import Directories


def choose(
    names: Sequence[str], model: str, plan: Plan, where: Directories
) -> tuple[Workload, ...]:
    """The named workloads, or all that suit the model; raises SettingsInvalid."""
    if not names:
        return _all(model, plan, where)
    found = tuple(_workload(name) for name in dict.fromkeys(names))
    for one in found:
        if reason := _unsuited(one, model, plan, where):
            raise SettingsInvalid(f"the workload {one.name} cannot be measured: {reason}")
    return found


def _all(model: str, plan: Plan, where: Directories) -> tuple[Workload, ...]:
    reasons = {one: _unsuited(one, model, plan, where) for one in WORKLOADS.values()}
    if found := tuple(one for one, reason in reasons.items() if reason is None):
        return found
    every = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    raise SettingsInvalid(f"no workload suits {model}: {every}")


def _workload(name: str) -> Workload:
    if name in WORKLOADS:
        return WORKLOADS[name]
    near = nearest(name, WORKLOADS)
    raise SettingsInvalid(
        f"no workload is named {name!r}" + (f"; did you mean {near}?" if near else ""),
        hint=f"workloads: {', '.join(WORKLOADS)}",
    )


def _unsuited(workload: Workload, model: str, plan: Plan, where: Directories) -> str | None:
    embedding = plan.embedding
    if workload.for_embedding and embedding is None:
        return f"{model} makes no embeddings"
    if workload.for_embedding and embedding and embedding.pooling == "rank":
        return f"{model} ranks texts"
    if not workload.for_embedding and embedding and embedding.is_only:
        return f"{model} generates no text"
    return workload.unavailable(model, where)
