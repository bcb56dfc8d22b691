"""All nodes, and the models here and there as one loader's.

No node is ever asked to load a model, or to swap one for another: what it does not have loaded is
not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.upstream import Upstream
from proxy.errors import Unavailable, UpstreamLoading, UpstreamUnreached, UpstreamUnready
from proxy.failures import persist
from proxy.line.dispatch import Dispatch
from proxy.loader import Loader, ModelCard
from proxy.nodes.cards import combined, place_of
from proxy.nodes.settings import NodeSettings
from proxy.nodes.watcher import Watcher
from proxy.record import Tell
from proxy.settings import ProxySettings

_RETRY_AFTER_S = 10


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of a node at one moment.

    Attributes:
        name: Its name.
        url: Where it is.
        is_up: Whether it answered lately.
        trouble: Why it is not up, or None.
        models: What it calls its models that are served here, or were.
        slots: Requests that it gets at once, over all models; 0 while it is not up.
        slots_busy: Requests that it has now.
    """

    name: str
    url: str
    is_up: bool
    trouble: str | None
    models: tuple[str, ...]
    slots: int
    slots_busy: int


class Nodes:
    """The nodes; a `proxy.loader.Loader` of what is here and there.

    Args:
        nodes: What is set for each.
        dispatch: Where their models are admitted; it tells them of requests that fail.
        here: Who brings up the models that are configured here.
        settings: The proxy's limits.
        tell: Hears when a node comes and goes.
        created: Unix time in whole seconds, for the models that only nodes have.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSettings],
        dispatch: Dispatch,
        here: Loader,
        settings: ProxySettings,
        tell: Tell,
        created: int,
    ) -> None:
        self._here = here
        self._dispatch = dispatch
        self._created = created
        self._settings = settings
        self._tell = tell
        self._watchers: dict[str, Watcher] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        dispatch.unreached = self.unreached
        self.take(nodes)

    async def serve(self) -> None:
        """Watch those that there are at any time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._watchers:
                self._begin(name)
            try:
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def take(self, nodes: Sequence[NodeSettings]) -> None:
        """Have these nodes from now on. One that is set as before is not disturbed.

        What one that left, or is set otherwise now, still answers, it answers to the end.
        """
        wanted = {node.name: node for node in nodes}
        for name, watcher in list(self._watchers.items()):
            if watcher.node != wanted.get(name):
                self._drop(name)
        kept = self._watchers
        self._watchers = {one.name: kept.get(one.name) or self._watcher(one) for one in nodes}
        for name in wanted.keys() - kept.keys():
            self._begin(name)

    def _watcher(self, node: NodeSettings) -> Watcher:
        return Watcher(node, self._dispatch, self._here.models, self._settings, self._tell)

    def _begin(self, name: str) -> None:
        if self._group:
            self._tasks[name] = self._group.create_task(persist("node", self._watchers[name].serve))

    def _drop(self, name: str) -> None:
        self._watchers.pop(name).leave()
        if task := self._tasks.pop(name, None):
            task.cancel()

    def unreached(self, upstream: Upstream, error: UpstreamUnreached) -> None:
        """Note that an instance did not begin to answer; nothing unless it is a node's."""
        is_there = isinstance(error, UpstreamLoading | UpstreamUnready)
        if upstream.node and not is_there and upstream.node.name in self._watchers:
            self._watchers[upstream.node.name].doubt()

    def facts(self) -> list[NodeFacts]:
        """Return what is known of each."""
        return [self._facts(watcher) for watcher in self._watchers.values()]

    def _facts(self, watcher: Watcher) -> NodeFacts:
        offered, upstreams = watcher.offered(), watcher.upstreams()
        names = [f"{watcher.node.name}/{one.offer.id}" for one in offered]
        return NodeFacts(
            name=watcher.node.name,
            url=watcher.node.url,
            is_up=watcher.is_up,
            trouble=None if watcher.is_up else watcher.trouble,
            models=tuple(one.offer.id for one in offered),
            slots=sum(one.slots for one in upstreams.values()),
            slots_busy=sum(self._dispatch.busy(name) for name in names),
        )

    # proxy.loader.Loader.

    def models(self) -> Sequence[ModelCard]:
        """Return every model that is configured here, then those that only nodes have."""
        here = self._here.models()
        there = [one for watcher in self._watchers.values() for one in watcher.offered()]
        return combined(here, there, self._created) if there else here

    async def ensure_ready(self, model: str) -> None:
        """Return once an instance of the model is admitted; the caller sets the deadline.

        Raises:
            ProxyError: It will not be: Unavailable, UnknownModel or UpstreamFailed say why.
        """
        here = self._here.models()
        watchers = [one for one in self._watchers.values() if self._offers(one, model, here)]
        if any(card.id == model for card in here) or not watchers:
            await self._here.ensure_ready(model)
            return
        for watcher in watchers:
            await watcher.settled()
        if not self._dispatch.serves(model):
            troubles = "; ".join(f"{one.node.name}: {one.trouble}" for one in watchers)
            raise Unavailable(f"{model} cannot answer: {troubles}", _RETRY_AFTER_S)

    @staticmethod
    def _offers(watcher: Watcher, model: str, here: Sequence[ModelCard]) -> bool:
        return any(place_of(one.offer, here) == model for one in watcher.offered())
