"""All nodes, and one list of local and remote models.

No node is ever made to load a model, or to replace one by another: only the models that it has
loaded exist here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.access_log import Emit
from proxy.errors import Unavailable, UpstreamConnectFailed, UpstreamLoading, UpstreamUnavailable
from proxy.failures import persist
from proxy.models import ModelInfo, ModelLoader, ModelNames
from proxy.nodes.model_list import NO_NODE, RemoteModel, merged, served_id
from proxy.nodes.monitor import NodeMonitor
from proxy.nodes.prefix_reader import PrefixReader
from proxy.nodes.settings import ConfiguredNode
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

_RETRY_AFTER_S = 10


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One node.

    Attributes:
        problem: Why it is not up.
        models: The node's ids of the models that are or were served here.
        slots: Concurrent requests that it gets over all models; 0 while it is not up.
    """

    name: str
    url: str
    is_up: bool
    problem: str | None
    models: tuple[str, ...]
    slots: int
    slots_busy: int


class Nodes:
    """Monitors the nodes; a `proxy.models.ModelLoader` of local and remote models.

    `created` (Unix time in whole seconds) is for the models that only nodes have.
    """

    def __init__(
        self,
        nodes: Sequence[ConfiguredNode],
        router: Router,
        local: ModelLoader,
        settings: ProxySettings,
        emit: Emit,
        created: int,
    ) -> None:
        self._local = local
        self._router = router
        self._created = created
        self._settings = settings
        self._emit = emit
        self._monitors: dict[str, NodeMonitor] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._names = self._named_local = ModelNames(())
        self._named_offered: list[tuple[RemoteModel, ...]] = []
        self.set_nodes(nodes)

    async def serve(self) -> None:
        """Monitor the current nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._monitors:
                self._begin(name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def set_nodes(self, nodes: Sequence[ConfiguredNode]) -> None:
        """Replace the nodes; unchanged ones keep their state.

        In-flight requests of removed or changed ones are not cut.
        """
        configured = {node.name: node for node in nodes}
        for name, monitor in list(self._monitors.items()):
            if monitor.node != configured.get(name):
                self._drop(name)
        kept = self._monitors
        self._monitors = {one.name: kept.get(one.name) or self._monitor(one) for one in nodes}
        for name in configured.keys() - kept.keys():
            self._begin(name)

    def _monitor(self, node: ConfiguredNode) -> NodeMonitor:
        return NodeMonitor(node, self._router, self._local.names, self._settings, self._emit)

    def _begin(self, name: str) -> None:
        if self._group is None:
            return
        monitor = self._monitors[name]
        prefixes = PrefixReader(
            monitor.node,
            self._router,
            self._settings,
            monitor.upstreams,
            lambda: len(self._monitors),
        )
        self._tasks[name] = [
            self._group.create_task(persist("node", monitor.serve)),
            self._group.create_task(persist("node", prefixes.serve)),
        ]

    def _drop(self, name: str) -> None:
        self._monitors.pop(name).stop()
        for task in self._tasks.pop(name, ()):
            task.cancel()

    def mark_suspect(self, upstream: Upstream, error: UpstreamConnectFailed) -> None:
        """An instance did not begin to answer; ignored unless it is a node's."""
        is_reachable = isinstance(error, UpstreamLoading | UpstreamUnavailable)
        if upstream.node and not is_reachable and upstream.node.name in self._monitors:
            self._monitors[upstream.node.name].mark_suspect()

    def stats(self) -> list[NodeStats]:
        return [self._stats_of(monitor) for monitor in self._monitors.values()]

    def _stats_of(self, monitor: NodeMonitor) -> NodeStats:
        offered, name = monitor.offered(), monitor.node.name
        models = tuple(one.remote_model.id for one in offered)
        return NodeStats(
            name=name,
            url=monitor.node.settings.url,
            is_up=monitor.is_up,
            problem=None if monitor.is_up else monitor.problem,
            models=models,
            slots=sum(one.slots for one in monitor.upstreams().values()),
            slots_busy=sum(self._router.in_flight(f"{name}/{model}") for model in models),
        )

    def models(self) -> Sequence[ModelInfo]:
        """Local models, then those that only nodes have."""
        local = self._local.models()
        offered = [one for monitor in self._monitors.values() for one in monitor.offered()]
        fallback = self._settings.fallback
        return merged(local, offered, self._created, fallback) if offered or fallback else local

    def names(self) -> ModelNames:
        local = self._local.names()
        offered = [monitor.remote_models for monitor in self._monitors.values()]
        if not any(offered) and not self._settings.fallback:
            return local
        if local is not self._named_local or offered != self._named_offered:
            self._named_local, self._named_offered = local, offered
            self._names = ModelNames(self.models(), local.default)
        return self._names

    async def ensure_ready(self, model: str) -> None:
        """Return once an instance of the model is admitted; the caller has a deadline.

        Raises:
            ProxyError: None will be: Unavailable, UnknownModel or UpstreamFailed.
        """
        local = self._local.names()
        monitors = [
            monitor
            for monitor in self._monitors.values()
            if any(served_id(one.remote_model, local) == model for one in monitor.offered())
        ]
        is_local = any(model_info.id == model for model_info in local.model_infos)
        if not is_local and not monitors and model in self._settings.fallback:
            raise Unavailable(f"{model} is unavailable: {NO_NODE}", _RETRY_AFTER_S)
        if is_local or not monitors:
            await self._local.ensure_ready(model)
            return
        for monitor in monitors:
            await monitor.wait_checked()
        if not self._router.serves(model):
            problems = "; ".join(f"{one.node.name}: {one.problem}" for one in monitors)
            raise Unavailable(f"{model} is unavailable: {problems}", _RETRY_AFTER_S)
