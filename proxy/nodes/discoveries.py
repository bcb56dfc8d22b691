"""The names that stand for nodes, and their machines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from proxy.access_log import Emit
from proxy.failures import persist
from proxy.nodes.addresses import ADDRESSES_MAX, Answer, Known, NodeAddress
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.discovery import Discovery
from proxy.nodes.monitors import NodeMonitors
from proxy.nodes.url import parse_name_server


class Discoveries:
    """Follows the records of names, within `serve`."""

    def __init__(self, monitors: NodeMonitors, emit: Emit) -> None:
        self._monitors = monitors
        self._emit = emit
        self._discoveries: dict[str, Discovery] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def serve(self) -> None:
        """Follow them until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._discoveries:
                self._begin(name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    # No method below awaits.

    def known(self, name: str) -> Known:
        return self._discoveries[name].known

    def add(self, node: ConfiguredNode) -> None:
        """Follow the name of a node; one that is followed already is left as it is."""
        if node.name not in self._discoveries:
            change = functools.partial(self._set_addresses, node)
            room = functools.partial(self._room, node.name)
            self._discoveries[node.name] = Discovery(
                node.name, _resolve_of(node), change, self._emit, room
            )
            self._begin(node.name)

    def remove(self, name: str) -> None:
        self._discoveries.pop(name, None)
        if task := self._tasks.pop(name, None):
            task.cancel()

    def _begin(self, name: str) -> None:
        if self._group:
            serve = self._discoveries[name].serve
            self._tasks[name] = self._group.create_task(persist("discovery", serve))

    def _room(self, name: str) -> int:
        """How many addresses a name may have beside those of the others."""
        others = (found for other, found in self._discoveries.items() if other != name)
        return ADDRESSES_MAX - sum(len(found.known.addresses) for found in others)

    def _set_addresses(self, node: ConfiguredNode, addresses: Sequence[NodeAddress]) -> None:
        machines = [node.at(address) for address in addresses]
        self._monitors.replace(node.name, machines, "its record was removed")


def _resolve_of(node: ConfiguredNode) -> Callable[[], Awaitable[Answer]]:
    settings = node.settings
    if settings.parsed_url.discovery == "mdns":
        from proxy.nodes import mdns_resolver  # noqa: PLC0415 (only where a url needs it)

        return functools.partial(mdns_resolver.resolve, settings.parsed_url)
    from proxy.nodes.dns_resolver import resolve  # noqa: PLC0415 (as above)

    server = parse_name_server(settings.resolver) if settings.resolver else None
    return functools.partial(resolve, settings.parsed_url, server)
