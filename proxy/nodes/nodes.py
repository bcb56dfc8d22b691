"""All nodes, and one list of local and remote models.

Only the models that a node has loaded exist here, unless it agrees to load others, and the settings
say that it is to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from proxy.access_log import Emit
from proxy.errors import (
    Unavailable,
    UpstreamConnectFailed,
    UpstreamDraining,
    UpstreamLoading,
    UpstreamUnavailable,
)
from proxy.failures import persist
from proxy.models import ModelInfo, ModelLoader, ModelNames, OnLoad, nothing
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.discoveries import Discoveries
from proxy.nodes.merged_models import NO_NODE, merged
from proxy.nodes.model_list import RemoteModel, served_id
from proxy.nodes.monitor import MonitorContext, NodeMonitor
from proxy.nodes.monitors import NodeMonitors
from proxy.nodes.processes import NodeProcesses
from proxy.nodes.remote_loading import RemoteLoading
from proxy.nodes.stats import NodeStats, stats_of, stats_of_name
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

_RETRY_AFTER_S: Final = 10
_REMOVED: Final = "it is no longer configured"


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
        self._settings = settings
        self._created = created
        self._processes = NodeProcesses()
        context = MonitorContext(
            router,
            local.names,
            settings,
            self._processes,
            emit,
            self._forget_names,
            lambda: len(self._monitors),
        )
        self._configured: dict[str, ConfiguredNode] = {}
        self._monitors = NodeMonitors(context)
        self._discoveries = Discoveries(self._monitors, emit)
        self._loading = RemoteLoading(router, settings, self._offers, emit)
        self._names: ModelNames | None = None
        self._named_local = ModelNames(())
        self.set_nodes(nodes)

    @property
    def process(self) -> str:
        """What other machines know this one by."""
        return self._processes.own

    async def serve(self) -> None:
        """Monitor the current nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._monitors.serve())
            group.create_task(self._discoveries.serve())
            group.create_task(persist("node", self._loading.serve))

    def set_nodes(self, nodes: Sequence[ConfiguredNode]) -> None:
        """Replace the nodes; unchanged ones keep their state.

        In-flight requests of removed or changed ones are not cut.
        """
        configured = {node.name: node for node in nodes}
        for name, node in self._configured.items():
            if node != configured.get(name):
                self._discoveries.remove(name)
                self._monitors.replace(name, (), _REMOVED)
        for name, node in configured.items():
            if node.is_found:
                self._discoveries.add(node)
            else:
                self._monitors.replace(name, (node,), _REMOVED)
        self._configured = configured

    def mark_suspect(self, upstream: Upstream, error: UpstreamConnectFailed) -> None:
        """An instance did not begin to answer; ignored unless it is a node's."""
        is_reachable = isinstance(error, UpstreamLoading | UpstreamUnavailable)
        if upstream.node is None or (is_reachable and not isinstance(error, UpstreamDraining)):
            return
        if monitor := self._monitors.get(upstream.node.name):
            monitor.mark_suspect()

    def stats(self) -> list[NodeStats]:
        """Nodes in the order of the settings, then those that leave."""
        found: list[NodeStats] = []
        for name, node in self._configured.items():
            if node.is_found:
                found.append(stats_of_name(node, self._discoveries.known(name)))
            monitors = self._monitors.of(name)
            found += [
                stats_of(one, self._router)
                for one in monitors
                if not (node.is_found and one.state == "same")
            ]
        return [*found, *(stats_of(one, self._router) for one in self._monitors.leaving())]

    def models(self) -> Sequence[ModelInfo]:
        """Local models, then those that only nodes have."""
        local = self._local.models()
        offered = [one for monitor in self._monitors for one in monitor.offered()]
        fallback = self._settings.fallback
        return merged(local, offered, self._created, fallback) if offered or fallback else local

    def names(self) -> ModelNames:
        local = self._local.names()
        if self._names is None or local is not self._named_local:
            has_more = self._settings.fallback or any(one.remote_models for one in self._monitors)
            names = ModelNames(self.models(), local.default) if has_more else local
            self._named_local, self._names = local, names
        return self._names

    def _offers(self) -> Iterator[tuple[NodeMonitor, RemoteModel, str]]:
        local = self._local.names()
        for monitor in self._monitors:
            for remote_model in monitor.remote_models:
                if model := served_id(remote_model, local):
                    yield monitor, remote_model, model

    def _forget_names(self) -> None:
        self._names = None

    async def ensure_ready(self, model: str, on_load: OnLoad = nothing) -> None:
        """Return once an instance of the model is admitted; the caller has a deadline.

        Raises:
            ProxyError: None will be: Unavailable, UnknownModel or UpstreamFailed.
        """
        local = self._local.names()
        monitors = [
            monitor
            for monitor in self._monitors
            if any(served_id(one.remote_model, local) == model for one in monitor.offered())
        ]
        is_local = any(model_info.id == model for model_info in local.model_infos)
        if not is_local and not monitors and model in self._settings.fallback:
            raise Unavailable(f"{model} is unavailable: {NO_NODE}", _RETRY_AFTER_S)
        if is_local or not monitors:
            await self._local.ensure_ready(model, on_load)
            return
        on_load()
        for monitor in monitors:
            await monitor.wait_checked()
        if self._loading.has_loadable(model):
            await self._loading.load(model)
        if not self._router.serves(model):
            problems = "; ".join(f"{one.node.name}: {one.problem}" for one in monitors)
            raise Unavailable(f"{model} is unavailable: {problems}", _RETRY_AFTER_S)
