"""All nodes, and one list of local and remote models.

If a node in the settings is a name, its machines follow the name's records. Only a node's loaded
models are listed, except if it agrees to load others and the settings allow asking it.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, NoReturn

from prometheus_client import Metric

from proxy import errors
from proxy.common.background_tasks import persist
from proxy.nodes.configured import (
    ADDRESSES_MAX,
    NODE_TIMES,
    Answer,
    ConfiguredNode,
    Known,
    NodeTimes,
    after,
)
from proxy.nodes.gather import NodeAnswer, Question, ask_all
from proxy.nodes.loading import RemoteLoading
from proxy.nodes.model_list import (
    NO_NODE,
    OfferedModel,
    RemoteModels,
    merge_models,
    names_of,
    remote_models,
    served_id,
)
from proxy.nodes.monitor import NodeMonitor, NodeMonitors, NodeState
from proxy.nodes.settings import parse_name_server
from proxy.nodes.slot_files import NodeSlotFiles
from proxy.observe.metrics import gauge
from proxy.observe.record import Emit, LoadCause
from proxy.request.models import ModelInfo, ModelLoader, ModelNames, OnLoad, do_nothing_on_load
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream


class Discovery:
    """The addresses of one name, each of which has a monitor.

    `room` returns the number of addresses that other names leave to one.
    """

    def __init__(
        self, node: ConfiguredNode, monitors: NodeMonitors, room: Callable[[Discovery], int]
    ) -> None:
        self.known = Known()
        self._node = node
        self._monitors = monitors
        self._resolve = _resolve_of(node, monitors.times)
        self._room = room

    async def serve(self) -> None:
        while True:
            self._take(await self._resolve())
            # The variation keeps machines that started together from asking together.
            share = random.uniform(0.9, 1.0)  # noqa: S311 (no secret)
            await asyncio.sleep(self.known.pause_s(self._monitors.times) * share)

    # No method below awaits.

    def _take(self, answer: Answer) -> None:
        before, self.known = self.known, after(self.known, answer, self._room(self))
        added = set(self.known.addresses) - set(before.addresses)
        removed = set(before.addresses) - set(self.known.addresses)
        if added or removed:
            self._monitors.emit(
                "node.resolved",
                node=self._node.name,
                added=[str(address) for address in sorted(added)],
                removed=[str(address) for address in sorted(removed)],
                addresses=len(self.known.addresses),
            )
            machines = [self._node.machine_at(address) for address in self.known.addresses]
            self._monitors.replace(self._node.name, machines, "its record was removed")
        if self.known.problem and self.known.problem != before.problem:
            self._monitors.emit("node.unresolved", node=self._node.name, reason=self.known.problem)


def _resolve_of(node: ConfiguredNode, times: NodeTimes) -> Callable[[], Awaitable[Answer]]:
    settings = node.settings
    if settings.parsed_url.discovery == "mdns":
        from proxy.nodes import mdns  # noqa: PLC0415 (only if a url needs it)

        return functools.partial(mdns.resolve, settings.parsed_url)
    if settings.parsed_url.discovery == "file":
        from proxy.nodes import files  # noqa: PLC0415 (as above)

        return functools.partial(files.resolve, settings.parsed_url)
    from proxy.nodes.dns_resolver import resolve  # noqa: PLC0415 (as above)

    server = parse_name_server(settings.resolver) if settings.resolver else None
    return functools.partial(resolve, settings.parsed_url, server, times.dns_timeout_s)


@dataclass(frozen=True, slots=True)
class NodeStats:
    """The state of one node, or of a name with several nodes."""

    name: str
    url: str
    state: NodeState | Literal["resolved", "unresolved"]  # For a name: resolved or unresolved.
    problem: str | None  # Why it is not up, or an error in the records.
    models: tuple[str, ...] = ()  # The node's ids of models that are or were served here.
    slots: int = 0  # Concurrent requests for all its models; 0 while it is not up.
    slots_busy: int = 0
    received_bytes: int = 0  # Of the responses to this llama-corral.


def stats_of(monitor: NodeMonitor, router: Router) -> NodeStats:
    name = monitor.node.name
    models = tuple(model.id for model in monitor.remote_models if model.is_loaded)
    activities = [router.activity(f"{name}/{model}") for model in models]
    return NodeStats(
        name=name,
        url=monitor.node.url,
        state=monitor.state,
        problem=None if monitor.is_up else monitor.problem,
        models=models,
        slots=sum(upstream.slots for upstream in monitor.admitted.values()),
        slots_busy=sum(activity.in_flight for activity in activities),
        received_bytes=sum(activity.bytes_received for activity in activities),
    )


_RETRY_AFTER_S: Final = 10
# Up to this number of names are merged at once, in 2 ms; more in a thread.
_NAMES_AT_ONCE: Final = 256
_REMOVED: Final = "it is no longer configured"


class Nodes:
    """Monitors the nodes; a `proxy.request.models.ModelLoader` for local and remote models."""

    def __init__(
        self,
        nodes: Sequence[ConfiguredNode],
        router: Router,
        local: ModelLoader,
        settings: ProxySettings,
        emit: Emit,
        times: NodeTimes = NODE_TIMES,
    ) -> None:
        self._local = local
        self._router = router
        self._settings = settings
        # Of models that only nodes have.
        self._created = int(datetime.now(UTC).timestamp())
        self._configured: dict[str, ConfiguredNode] = {}
        self._on_demand: frozenset[str] = frozenset()
        self._monitors = NodeMonitors(router, local.names, settings, emit, self._note_change, times)
        self._discoveries: dict[str, Discovery] = {}
        self._loading = RemoteLoading(self._monitors)
        self._merged = RemoteModels(ModelNames(()))
        self._names = ModelNames(())
        self._named = self._merged, self._names  # the arguments of `_names`
        # Incremented when a node's models change; `_merged_version` is that of `_merged`.
        self._version = self._merged_version = 0
        self._is_stale = asyncio.Event()
        self._changed = asyncio.Event()
        self.set_nodes(nodes)
        router.signals.connect_failed.connect(self.mark_suspect)
        router.signals.admitted.connect(self._wake)
        self.slot_files = NodeSlotFiles(self._monitors)

    @property
    def process(self) -> str:
        """The random word by which other machines recognise this process."""
        return self._monitors.process

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._monitors.tasks.serve())
            group.create_task(persist("node", self._loading.serve))
            group.create_task(persist("node", self._merge_in_thread))

    def set_nodes(self, nodes: Sequence[ConfiguredNode]) -> None:
        """Replace the nodes; unchanged ones keep their state.

        In-flight requests of removed or changed ones are not cut.
        """
        configured = {node.name: node for node in nodes}
        for name, node in self._configured.items():
            if node != configured.get(name):
                if self._discoveries.pop(name, None):
                    self._monitors.tasks.end("discovery", name)
                self._monitors.replace(name, (), _REMOVED)
                self._monitors.forget_processes(node)
        for name, node in configured.items():
            if not node.is_found:
                self._monitors.replace(name, (node,), _REMOVED)
            elif name not in self._discoveries:
                discovery = Discovery(node, self._monitors, self._room)
                self._discoveries[name] = discovery
                self._monitors.tasks.begin("discovery", name, discovery.serve)
        self._configured = configured
        self._on_demand = frozenset(
            model for node in nodes if node.settings.on_demand for model in node.settings.models
        )
        self._note_change()

    def _room(self, discovery: Discovery) -> int:
        others = (found for found in self._discoveries.values() if found is not discovery)
        return ADDRESSES_MAX - sum(len(found.known.addresses) for found in others)

    def mark_suspect(self, upstream: Upstream, error: errors.UpstreamConnectFailed) -> None:
        """Note that an instance did not begin to answer; ignored unless it belongs to a node."""
        is_reachable = isinstance(error, errors.UpstreamLoading | errors.UpstreamUnavailable)
        if upstream.node is None or (
            is_reachable and not isinstance(error, errors.UpstreamDraining)
        ):
            return
        if monitor := self._monitors.get(upstream.node.name):
            monitor.mark_suspect()

    def stats(self) -> list[NodeStats]:
        """Return nodes in the order of the settings, then removed ones that still answer."""
        found: list[NodeStats] = []
        for name, node in self._configured.items():
            if node.is_found:
                problem = self._discoveries[name].known.problem
                state: Literal["resolved", "unresolved"] = "unresolved" if problem else "resolved"
                found.append(NodeStats(name, node.settings.url, state, problem))
            monitors = self._monitors.monitors_of(name)
            found += [
                stats_of(monitor, self._router)
                for monitor in monitors
                if not (node.is_found and monitor.state == "same")
            ]
        return [*found, *(stats_of(monitor, self._router) for monitor in self._monitors.leaving())]

    def metrics(self) -> Iterator[Metric]:
        monitors = (monitor for monitor in self._monitors if monitor.state != "same")
        yield gauge("node_up", {(found.node.name,): float(found.is_up) for found in monitors})

    async def ask(self, question: Question, query: Mapping[str, str]) -> list[NodeAnswer]:
        """Ask each node in use; names without all addresses come last, with their problem."""
        unresolved = [
            NodeAnswer(name, problem=discovery.known.problem)
            for name, discovery in self._discoveries.items()
            if discovery.known.problem
        ]
        monitors = [
            monitor
            for name in self._configured
            for monitor in self._monitors.monitors_of(name)
            if monitor.state != "same"
        ]
        timeout_s = self._monitors.times.ask_s
        answers = await ask_all(monitors, self._settings, question, query, timeout_s)
        return [*answers, *unresolved]

    def models(self) -> Sequence[ModelInfo]:
        """Return local models, then those that only nodes have."""
        return merge_models(self._local.models(), self._remote_models())

    def names(self) -> ModelNames:
        local, remote = self._local.names(), self._remote_models()
        if not (remote.by_local_id or remote.others):
            return local
        if self._named != (remote, local):
            self._names = ModelNames(merge_models(self._local.models(), remote), local.default)
            self._named = remote, local
        return self._names

    def _remote_models(self) -> RemoteModels:
        """Return nodes' models now; with many names, the latest merge by a thread."""
        local = self._local.names()
        if self._merged.local is local and self._merged_version == self._version:
            return self._merged
        count = sum(
            names_of(found) for monitor in self._monitors for found in monitor.remote_models
        )
        if count > _NAMES_AT_ONCE:
            self._is_stale.set()
        else:
            self._merged = self._merge(local, self._all_offers())
            self._merged_version = self._version
        return self._merged

    def _all_offers(self) -> list[OfferedModel]:
        return [offer for monitor in self._monitors for offer in monitor.offers()]

    def _merge(self, local: ModelNames, offered: Sequence[OfferedModel]) -> RemoteModels:
        fallback = self._settings.fallback
        return remote_models(local, offered, self._created, fallback, sorted(self._on_demand))

    async def _merge_in_thread(self) -> NoReturn:
        """Merge long lists when they have changed; the previous merge is served meanwhile."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            version = self._version
            self._merged = await asyncio.to_thread(
                self._merge, self._local.names(), self._all_offers()
            )
            self._merged_version = version

    def _note_change(self) -> None:
        self._version += 1
        self._wake()

    def _wake(self) -> None:
        """Have requests that wait for a machine look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def ensure_ready(
        self, model: str, on_load: OnLoad = do_nothing_on_load
    ) -> LoadCause | None:
        """Return once an instance of the model is admitted, as `ModelLoader` has it.

        Raises:
            ProxyError: No instance will be admitted: Unavailable, UnknownModel or UpstreamFailed.
        """
        local = self._local.names()
        monitors = [
            monitor
            for monitor in self._monitors
            if any(served_id(offered, local) == model for offered in monitor.remote_models)
        ]
        is_local = any(model_info.id == model for model_info in local.model_infos)
        is_on_demand = model in self._on_demand
        if not (is_local or monitors or is_on_demand) and model in self._settings.fallback:
            raise errors.Unavailable(f"{model} is unavailable: {NO_NODE}", _RETRY_AFTER_S)
        if is_local or not (monitors or is_on_demand):
            return await self._local.ensure_ready(model, on_load)
        on_load()
        for monitor in monitors:
            await monitor.checked.wait()
        if self._loading.loadable(model):
            await self._loading.load(model)
        # A program starts a machine because this request waits; its queue timeout is the limit.
        while model in self._on_demand and not self._router.serves(model):
            await self._changed.wait()
        if not self._router.serves(model):
            problems = "; ".join(f"{found.node.name}: {found.problem}" for found in monitors)
            reason = problems or NO_NODE
            raise errors.Unavailable(f"{model} is unavailable: {reason}", _RETRY_AFTER_S)
        return None
