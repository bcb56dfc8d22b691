"""Monitors each node: whether it is up, a duplicate of another node, and which models it offers.

A node is polled every 5 s, and its models are admitted to the router. After two failures in a row,
or one failure after a request that it did not begin to answer, they are withdrawn until it answers
again; meanwhile the pause between polls grows to a minute. A node that reports that it is stopping
gets no more requests. In-flight requests are not cut. State changes only in methods without
`await`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from proxy.common.background_tasks import persist
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.nodes.configured import NODE_TIMES, ConfiguredNode, NodeTimes
from proxy.nodes.model_list import OfferedModel, RemoteModel, Unreadable, served_id
from proxy.nodes.poll import NodeDraining, NodePoller, NodeProcesses, PrefixReader
from proxy.observe.record import Emit
from proxy.request.models import ModelNames
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Upstream

NodeState = Literal["up", "down", "draining", "same"]

_FAILURES: Final = 2


def pause_s(failures: int, chance: float, times: NodeTimes = NODE_TIMES) -> float:
    """Return the time until the next poll; `chance`, 0 to 1, varies it by up to a tenth."""
    wait_s = times.poll_s
    if failures:
        wait_s = min(times.retry_first_s * 2.0 ** min(failures - 1, 16), times.retry_max_s)
    return wait_s * (0.9 + 0.2 * chance)


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """The context that the monitors of all nodes share."""

    router: Router
    local: Callable[[], ModelNames]
    settings: ProxySettings
    processes: NodeProcesses
    emit: Emit
    on_change: Callable[[], None]  # Called when the models or the state of a node have changed.
    nodes: Callable[[], int]  # Returns the number of nodes.
    times: NodeTimes
    chance: Callable[[], float] = random.random
    # Held while the models of a node are admitted.
    takes_over: asyncio.Lock = field(default_factory=asyncio.Lock)


class NodeMonitor:
    """Polls one node; `problem` says why it is not up."""

    def __init__(self, node: ConfiguredNode, context: MonitorContext) -> None:
        self.node = node
        self.state: NodeState = "down"
        self.problem = "it was not polled yet"
        self.remote_models: tuple[RemoteModel, ...] = ()
        self._context = context
        self._poller = NodePoller(node, context.settings)
        self.prefixes = PrefixReader(
            node, context.router, context.settings, self.upstreams, context.nodes, context.times
        )
        self._failures = 0
        self._is_llama_corral = False
        self._admitted: dict[str, Upstream] = {}
        self._suspected = asyncio.Event()
        self._checked = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    async def serve(self) -> None:
        while True:
            self._suspected.clear()
            await self._poll()
            if not self._suspected.is_set():
                self._checked.set()
            wait_s = pause_s(self._failures, self._context.chance(), self._context.times)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._suspected.wait()

    def mark_suspect(self) -> None:
        """Withdraw its models and poll it now: it did not begin to answer a request."""
        self._failures = max(self._failures, _FAILURES - 1)
        self._withdraw_all()
        self._checked.clear()
        self._suspected.set()

    def poll_now(self) -> None:
        self._suspected.set()

    def stop(self, reason: str) -> None:
        """Withdraw its models and release waiting requests: it is not a node any more."""
        self._take_out("down", reason)
        self._checked.set()

    async def wait_checked(self) -> None:
        """Wait until a poll has ended; the caller has a deadline."""
        await self._checked.wait()

    def offers(self) -> list[OfferedModel]:
        name, problem = self.node.name, None if self.is_up else self.problem
        slots = self._poller.slots_of
        return [OfferedModel(model, slots(model), name, problem) for model in self.remote_models]

    def upstreams(self) -> Mapping[str, Upstream]:
        """Return its admitted models, by instance name."""
        return self._admitted

    async def _poll(self) -> None:
        try:
            remote_models, process = await self._poller.poll()
        except NodeDraining:
            # Poll it soon, like after a first failure: another process may take its place.
            self._failures = 1
            if self.state != "draining":
                self._context.emit("node.draining", node=self.node.name)
            self._take_out("draining", "it is stopping")
        except (UpstreamFailed, UpstreamTimeout, Unreadable) as error:
            self._note_failure(str(error).removeprefix(f"{self.node.name} "))
        else:
            upstreams = self._upstreams(remote_models)
            is_new = bool(upstreams.keys() - self._admitted.keys())
            if is_new and self.state != "same":
                await self.prefixes.read_first(upstreams)
            # Nodes with long lists are admitted one after the other, with a loop step in between.
            async with self._context.takes_over:
                self._note_answer(remote_models, process)
                await asyncio.sleep(0)

    # No method below awaits.

    def _note_failure(self, reason: str) -> None:
        self._failures += 1
        if self.is_up and self._failures < _FAILURES:
            return
        self._poller.forget_slots()
        if self.is_up or self._failures == 1:
            self._context.emit("node.down", node=self.node.name, reason=reason)
        self._take_out("down", reason)

    def _note_answer(self, remote_models: tuple[RemoteModel, ...], process: str) -> None:
        self._failures = 0
        if reason := self._context.processes.claim(process, self.node.name):
            self._set_models(())
            self._take_out("same", reason)
            return
        self._set_models(remote_models)
        if not self.is_up:
            self.state = "up"
            self._context.on_change()
            models = [model.id for model in remote_models if model.is_loaded]
            self._context.emit("node.up", node=self.node.name, models=models)
        self._is_llama_corral = bool(process)
        upstreams = self._upstreams(remote_models)
        for name in self._admitted.keys() - upstreams.keys():
            self._context.router.withdraw(name)
        for name, upstream in upstreams.items():
            if self._admitted.get(name) != upstream:
                self._context.router.admit(upstream)
        self._admitted = upstreams

    def _upstreams(self, remote_models: Sequence[RemoteModel]) -> dict[str, Upstream]:
        local = self._context.local()
        loaded = [model for model in remote_models if model.is_loaded]
        return {
            f"{self.node.name}/{remote_model.id}": self._upstream(remote_model, model)
            for remote_model in loaded
            if (model := served_id(remote_model, local))
        }

    def _upstream(self, remote_model: RemoteModel, model: str) -> Upstream:
        upstream = self.node.upstream(
            f"{self.node.name}/{remote_model.id}",
            remote_model.id,
            model,
            self._poller.slots_of(remote_model),
            remote_model.aliases,
            remote_model.variants,
        )
        if self._is_llama_corral and upstream.node:
            upstream = replace(upstream, node=replace(upstream.node, takes_keep_alive=True))
        return upstream

    def _set_models(self, remote_models: tuple[RemoteModel, ...]) -> None:
        if remote_models != self.remote_models:
            self.remote_models = remote_models
            self._context.on_change()

    def _take_out(self, state: NodeState, reason: str) -> None:
        self._withdraw_all()
        self._context.processes.release(self.node.name)
        if (state, reason) != (self.state, self.problem):
            self.state, self.problem = state, reason
            self._context.on_change()

    def _withdraw_all(self) -> None:
        for name in self._admitted:
            self._context.router.withdraw(name)
        self._admitted = {}


class NodeMonitors:
    """Runs a monitor for each node while `serve` runs; iterates over the monitors."""

    def __init__(self, context: MonitorContext) -> None:
        self._context = context
        self._monitors: dict[str, NodeMonitor] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._leaving: dict[str, NodeMonitor] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._monitors)

    def __iter__(self) -> Iterator[NodeMonitor]:
        return iter(self._monitors.values())

    def get(self, name: str) -> NodeMonitor | None:
        return self._monitors.get(name)

    def monitors_of(self, entry: str) -> list[NodeMonitor]:
        return [self._monitors[name] for name in self._names.get(entry, ())]

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._monitors:
                self._begin(name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    # No method below awaits.

    def replace(self, entry: str, nodes: Sequence[ConfiguredNode], reason: str) -> None:
        """Set the machines of one node in the settings; unchanged ones keep their state.

        In-flight requests of the others are not cut; `reason` says why they get no more.
        """
        wanted = {node.name: node for node in nodes}
        for monitor in self.monitors_of(entry):
            name = monitor.node.name
            if monitor.node != wanted.get(name):
                self._leaving[name] = self._monitors.pop(name)
                monitor.stop(reason)
                for task in self._tasks.pop(name, ()):
                    task.cancel()
        for name, node in wanted.items():
            if name not in self._monitors:
                self._leaving.pop(name, None)
                self._monitors[name] = NodeMonitor(node, self._context)
                self._begin(name)
        self._names[entry] = tuple(wanted)
        self._context.on_change()
        self.forget_unused()

    def leaving(self) -> list[NodeMonitor]:
        """Return the removed nodes that still answer requests."""
        self.forget_unused()
        return list(self._leaving.values())

    def forget_unused(self) -> None:
        for name, monitor in list(self._leaving.items()):
            instances = [f"{name}/{model.id}" for model in monitor.remote_models]
            if all(map(self._context.router.forget, instances)):
                del self._leaving[name]

    def _begin(self, name: str) -> None:
        if self._group is None:
            return
        monitor = self._monitors[name]
        self._tasks[name] = [
            self._group.create_task(persist("node", monitor.serve)),
            self._group.create_task(persist("node", monitor.prefixes.serve)),
        ]
