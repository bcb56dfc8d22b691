"""What is told of a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.nodes.addresses import Known
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.monitor import NodeMonitor, NodeState
from proxy.router.router import Router


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One node, or a name that stands for nodes.

    Attributes:
        state: Of a name, whether its records are known: resolved, unresolved.
        problem: Why it is not up, or what is wrong with the records.
        models: The node's ids of the models that are or were served here.
        slots: Concurrent requests that it gets over all models; 0 while it is not up.
    """

    name: str
    url: str
    state: NodeState | Literal["resolved", "unresolved"]
    problem: str | None
    models: tuple[str, ...] = ()
    slots: int = 0
    slots_busy: int = 0

    @property
    def is_up(self) -> bool:
        return self.state == "up"


def stats_of(monitor: NodeMonitor, router: Router) -> NodeStats:
    offered, name = monitor.offered(), monitor.node.name
    models = tuple(one.remote_model.id for one in offered if one.remote_model.is_loaded)
    return NodeStats(
        name=name,
        url=monitor.node.url,
        state=monitor.state,
        problem=None if monitor.is_up else monitor.problem,
        models=models,
        slots=sum(one.slots for one in monitor.upstreams().values()),
        slots_busy=sum(router.in_flight(f"{name}/{model}") for model in models),
    )


def stats_of_name(node: ConfiguredNode, known: Known) -> NodeStats:
    state: Literal["resolved", "unresolved"] = "unresolved" if known.problem else "resolved"
    return NodeStats(node.name, node.settings.url, state, known.problem)
