"""All nodes, and the models here and there as one loader's.

No node is ever asked to load a model, or to swap one for another: what it does not have loaded is
not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.access_log import Emit
from proxy.errors import Unavailable, UpstreamConnectFailed, UpstreamLoading, UpstreamUnavailable
from proxy.failures import persist
from proxy.models import ModelInfo, ModelLoader
from proxy.nodes.model_list import merged, served_id
from proxy.nodes.monitor import NodeMonitor
from proxy.nodes.settings import ConfiguredNode
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

_RETRY_AFTER_S = 10


@dataclass(frozen=True, slots=True)
class NodeStats:
    """What is known of a node at one moment.

    Attributes:
        name: Its name.
        url: Where it is.
        is_up: Whether it answered lately.
        problem: Why it is not up, or None.
        models: What it calls its models that are served here, or were.
        slots: Requests that it gets at once, over all models; 0 while it is not up.
        slots_busy: Requests that it has now.
    """

    name: str
    url: str
    is_up: bool
    problem: str | None
    models: tuple[str, ...]
    slots: int
    slots_busy: int


class Nodes:
    """The nodes; a `proxy.models.ModelLoader` of what is here and there.

    Args:
        nodes: What is set for each.
        router: Where their models are admitted.
        here: Who brings up the models that are configured here.
        settings: The proxy's limits.
        tell: Hears when a node comes and goes.
        created: Unix time in whole seconds, for the models that only nodes have.
    """

    def __init__(
        self,
        nodes: Sequence[ConfiguredNode],
        router: Router,
        here: ModelLoader,
        settings: ProxySettings,
        tell: Emit,
        created: int,
    ) -> None:
        self._here = here
        self._router = router
        self._created = created
        self._settings = settings
        self._tell = tell
        self._monitors: dict[str, NodeMonitor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.set_nodes(nodes)

    async def serve(self) -> None:
        """Watch those that there are at any time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._monitors:
                self._begin(name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def set_nodes(self, nodes: Sequence[ConfiguredNode]) -> None:
        """Have these nodes from now on. One that is set as before is not disturbed.

        What one that left, or is set otherwise now, still answers, it answers to the end.
        """
        wanted = {node.name: node for node in nodes}
        for name, monitor in list(self._monitors.items()):
            if monitor.node != wanted.get(name):
                self._drop(name)
        kept = self._monitors
        self._monitors = {one.name: kept.get(one.name) or self._monitor(one) for one in nodes}
        for name in wanted.keys() - kept.keys():
            self._begin(name)

    def _monitor(self, node: ConfiguredNode) -> NodeMonitor:
        return NodeMonitor(node, self._router, self._here.models, self._settings, self._tell)

    def _begin(self, name: str) -> None:
        if self._group:
            self._tasks[name] = self._group.create_task(persist("node", self._monitors[name].serve))

    def _drop(self, name: str) -> None:
        self._monitors.pop(name).stop()
        if task := self._tasks.pop(name, None):
            task.cancel()

    def mark_suspect(self, upstream: Upstream, error: UpstreamConnectFailed) -> None:
        """Note that an instance did not begin to answer; nothing unless it is a node's."""
        is_there = isinstance(error, UpstreamLoading | UpstreamUnavailable)
        if upstream.node and not is_there and upstream.node.name in self._monitors:
            self._monitors[upstream.node.name].mark_suspect()

    def stats(self) -> list[NodeStats]:
        """Return what is known of each."""
        return [self._facts(monitor) for monitor in self._monitors.values()]

    def _facts(self, monitor: NodeMonitor) -> NodeStats:
        offered, upstreams = monitor.offered(), monitor.upstreams()
        names = [f"{monitor.node.name}/{one.remote_model.id}" for one in offered]
        return NodeStats(
            name=monitor.node.name,
            url=monitor.node.settings.url,
            is_up=monitor.is_up,
            problem=None if monitor.is_up else monitor.problem,
            models=tuple(one.remote_model.id for one in offered),
            slots=sum(one.slots for one in upstreams.values()),
            slots_busy=sum(self._router.in_flight(name) for name in names),
        )

    # proxy.models.ModelLoader.

    def models(self) -> Sequence[ModelInfo]:
        """Return every model that is configured here, then those that only nodes have."""
        here = self._here.models()
        there = [one for monitor in self._monitors.values() for one in monitor.offered()]
        return merged(here, there, self._created) if there else here

    async def ensure_ready(self, model: str) -> None:
        """Return once an instance of the model is admitted; the caller sets the deadline.

        Raises:
            ProxyError: It will not be: Unavailable, UnknownModel or UpstreamFailed say why.
        """
        here = self._here.models()
        monitors = [one for one in self._monitors.values() if self._remote_models(one, model, here)]
        if any(model_info.id == model for model_info in here) or not monitors:
            await self._here.ensure_ready(model)
            return
        for monitor in monitors:
            await monitor.wait_checked()
        if not self._router.serves(model):
            troubles = "; ".join(f"{one.node.name}: {one.problem}" for one in monitors)
            raise Unavailable(f"{model} cannot answer: {troubles}", _RETRY_AFTER_S)

    @staticmethod
    def _remote_models(monitor: NodeMonitor, model: str, here: Sequence[ModelInfo]) -> bool:
        return any(served_id(one.remote_model, here) == model for one in monitor.offered())
