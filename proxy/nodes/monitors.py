"""The monitors of all nodes, by the node of the settings that each belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from proxy.failures import persist
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.monitor import MonitorContext, NodeMonitor


class NodeMonitors:
    """Runs a monitor for each node, within `serve`; iterates over them."""

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

    def of(self, entry: str) -> list[NodeMonitor]:
        """The monitors of one node of the settings."""
        return [self._monitors[name] for name in self._names.get(entry, ())]

    async def serve(self) -> None:
        """Run the monitors until cancelled."""
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
        """Set the machines of one node of the settings; unchanged ones keep their state.

        In-flight requests of others are not cut; `reason` says why those get no more.
        """
        wanted = {node.name: node for node in nodes}
        for monitor in self.of(entry):
            if monitor.node != wanted.get(monitor.node.name):
                self._drop(monitor.node.name, reason)
        for name, node in wanted.items():
            if name not in self._monitors:
                self._leaving.pop(name, None)
                self._monitors[name] = NodeMonitor(node, self._context)
                self._begin(name)
        self._names[entry] = tuple(wanted)
        self._context.on_change()
        self.forget_unused()

    def leaving(self) -> list[NodeMonitor]:
        """Those that are dropped and still answer requests."""
        self.forget_unused()
        return list(self._leaving.values())

    def forget_unused(self) -> None:
        """Forget dropped nodes that hold no request any more."""
        for name, monitor in list(self._leaving.items()):
            if all(self._context.router.forget(one) for one in _instances(monitor)):
                del self._leaving[name]

    def _begin(self, name: str) -> None:
        if self._group is None:
            return
        monitor = self._monitors[name]
        self._tasks[name] = [
            self._group.create_task(persist("node", monitor.serve)),
            self._group.create_task(persist("node", monitor.prefixes.serve)),
        ]

    def _drop(self, name: str, reason: str) -> None:
        monitor = self._leaving[name] = self._monitors.pop(name)
        monitor.stop(reason)
        for task in self._tasks.pop(name, ()):
            task.cancel()


def _instances(monitor: NodeMonitor) -> list[str]:
    return [f"{monitor.node.name}/{one.id}" for one in monitor.remote_models]
