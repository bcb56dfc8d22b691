"""All nodes, and one list of local and remote models.

Only the models that a node has loaded exist here, unless it agrees to load others, and the settings
say that it is to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

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
from proxy.nodes.merged_models import NO_NODE, RemoteModels, merged, remote_models
from proxy.nodes.model_list import OfferedModel, RemoteModel, names_of, served_id
from proxy.nodes.monitor import MonitorContext, NodeMonitor
from proxy.nodes.monitors import NodeMonitors
from proxy.nodes.processes import NodeProcesses
from proxy.nodes.remote_loading import RemoteLoading
from proxy.nodes.stats import NodeStats, stats_of, stats_of_name
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

_RETRY_AFTER_S: Final = 10
# So many names of nodes are merged at once, in 2 ms; more of them in a thread.
_NAMES_AT_ONCE: Final = 256
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
            self._note_change,
            lambda: len(self._monitors),
        )
        self._configured: dict[str, ConfiguredNode] = {}
        self._monitors = NodeMonitors(context)
        self._discoveries = Discoveries(self._monitors, emit)
        self._loading = RemoteLoading(router, settings, self._offers, emit)
        self._merged = RemoteModels(ModelNames(()))
        self._names = ModelNames(())
        self._named = self._merged, self._names  # what `_names` is of
        # What `_merged` is of: counted up when a node's models have changed.
        self._version = self._merged_version = 0
        self._is_stale = asyncio.Event()
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
            group.create_task(persist("node", self._merge_in_thread))

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
        return merged(self._local.models(), self._remote_models())

    def names(self) -> ModelNames:
        local, remote = self._local.names(), self._remote_models()
        if not (remote.by_local_id or remote.others):
            return local
        if self._named != (remote, local):
            self._names = ModelNames(merged(self._local.models(), remote), local.default)
            self._named = remote, local
        return self._names

    def _remote_models(self) -> RemoteModels:
        """What nodes offer now; if that is much, what a thread has merged last."""
        local = self._local.names()
        if self._merged.local is local and self._merged_version == self._version:
            return self._merged
        if self._count_names() > _NAMES_AT_ONCE:
            self._is_stale.set()
        else:
            self._merged = self._merge(local, self._offered())
            self._merged_version = self._version
        return self._merged

    def _count_names(self) -> int:
        return sum(names_of(found) for monitor in self._monitors for found in monitor.remote_models)

    def _offered(self) -> list[OfferedModel]:
        return [offer for monitor in self._monitors for offer in monitor.offered()]

    def _merge(self, local: ModelNames, offered: Sequence[OfferedModel]) -> RemoteModels:
        return remote_models(local, offered, self._created, self._settings.fallback)

    async def _merge_in_thread(self) -> NoReturn:
        """Merge long lists when they have changed; what was merged before is served meanwhile."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            version = self._version
            self._merged = await asyncio.to_thread(
                self._merge, self._local.names(), self._offered()
            )
            self._merged_version = version

    def _offers(self) -> Iterator[tuple[NodeMonitor, RemoteModel, str]]:
        local = self._local.names()
        for monitor in self._monitors:
            for remote_model in monitor.remote_models:
                if not remote_model.is_loaded and (model := served_id(remote_model, local)):
                    yield monitor, remote_model, model

    def _note_change(self) -> None:
        self._version += 1

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
