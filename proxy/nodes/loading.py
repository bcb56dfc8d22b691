"""Asks a node to load a model if no machine has it loaded, or if all that have it are busy.

Only nodes with `load = "idle"` in the settings are asked, and only for models that they list as
loadable; each decides whether it has room. They are asked one after the other, those with the
fewest requests first. A node that refuses is not asked again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import orjson
from multidict import CIMultiDict

from proxy.common.headers import HOP
from proxy.errors import Unavailable, UpstreamFailed, UpstreamTimeout
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.model_list import RemoteModel, served_id
from proxy.nodes.monitor import NodeMonitor, NodeMonitors
from proxy.upstream.client import UpstreamRequest

_FIRST_S: Final = 30.0
_LAST_S: Final = 600.0


def retry_delay_s(count: int) -> float:
    """Return the time until a node is asked again after `count` refusals in a row."""
    return min(_FIRST_S * 2.0 ** min(count - 1, 16), _LAST_S)


class LoadRefusals:
    """The refusals of nodes to load models.

    Nodes come and go; above `max_count`, the oldest refusal is forgotten.
    """

    def __init__(self, clock: Callable[[], float], *, max_count: int = 4096) -> None:
        self._clock = clock
        self._max_count = max_count
        # By node and model: the reason, the refusals in a row, and when it may be asked again.
        self._refusals: dict[tuple[str, str], tuple[str, int, float]] = {}

    def reason(self, node: str, model: str) -> str | None:
        """Return why a node must not be asked now; None: it may be."""
        reason, _, until_s = self._refusals.get((node, model), (None, 0, 0.0))
        return reason if reason and self._clock() < until_s else None

    def add(self, node: str, model: str, reason: str) -> None:
        _, before, _ = self._refusals.pop((node, model), ("", 0, 0.0))
        self._refusals[node, model] = reason, before + 1, self._clock() + retry_delay_s(before + 1)
        if len(self._refusals) > self._max_count:
            del self._refusals[next(iter(self._refusals))]

    def forget(self, node: str, model: str) -> None:
        self._refusals.pop((node, model), None)


# A node decides within 10 s.
_ASK_TIMEOUT_S: Final = 15.0
_ANSWER_MAX_BYTES: Final = 64 * 1024
# Time until a node that was asked lists the model as loading.
_BEGINS_S: Final = 5.0
_REASON_MAX_CHARACTERS: Final = 256
_RETRY_AFTER_S: Final = 30


class RemoteLoading:
    def __init__(self, nodes: NodeMonitors, clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes = nodes
        self._clock = clock
        self._refusals = LoadRefusals(clock)
        self._locks: dict[str, asyncio.Lock] = {}
        self._asked_until_s: dict[tuple[str, str], float] = {}

    async def load(self, model: str) -> None:
        """Return once an instance of a model is admitted; the caller has a deadline.

        Raises Unavailable: no node loads it.
        """
        async with self._locks.setdefault(model, asyncio.Lock()):
            while not self._nodes.router.serves(model):
                if not self._is_loading(model):
                    await self._ask_one(model)
                await asyncio.sleep(self._nodes.times.loading_poll_s)
                for monitor, _ in self.loadable(model):
                    monitor.poll_now()

    async def serve(self) -> None:
        """Have another node load a model while requests wait for it, until cancelled."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(self._nodes.times.waiting_look_s)
            before, waiting = waiting, self._waited_for()
            for model in before & waiting:
                if self._loadable_now(model) and not self._is_loading(model):
                    with suppress(Unavailable):  # requests wait for those that have it
                        await self._ask_one(model)

    async def _ask_one(self, model: str) -> None:
        """Have a node begin to load a model; raises Unavailable if none does."""
        for monitor, remote_model in self._loadable_now(model):
            reason = await self._ask(monitor.node, remote_model.id)
            node, remote_id = monitor.node.name, remote_model.id
            if reason is None:
                self._refusals.forget(node, remote_id)
                self._asked_until_s[node, remote_id] = self._clock() + _BEGINS_S
                self._nodes.emit("node.load_requested", node=node, model=remote_id)
                monitor.poll_now()
                return
            self._refusals.add(node, remote_id, reason)
            self._nodes.emit("node.load_refused", node=node, model=remote_id, reason=reason)
        reasons = [
            f"{monitor.node.name}: {self._refusals.reason(monitor.node.name, remote_model.id)}"
            for monitor, remote_model in self.loadable(model)
        ]
        raise Unavailable(
            f"{model} is unavailable: {'; '.join(reasons) or 'no node loads it'}", _RETRY_AFTER_S
        )

    async def _ask(self, node: ConfiguredNode, model: str) -> str | None:
        """Ask a node; return why it does not load the model."""
        body = orjson.dumps({"model": model})
        headers = CIMultiDict({HOP: "1", "Content-Type": "application/json"})
        request = UpstreamRequest("POST", "/models/load", "", headers, body)
        try:
            answer = await node.fetch(
                request, self._nodes.settings, _ASK_TIMEOUT_S, _ANSWER_MAX_BYTES
            )
        except (UpstreamFailed, UpstreamTimeout) as error:
            return str(error)
        return None if answer.status == 200 else _message(answer.body, answer.status)

    # No method below awaits.

    def _is_loading(self, model: str) -> bool:
        now_s = self._clock()
        return any(
            remote_model.state == "loading"
            or self._asked_until_s.get((monitor.node.name, remote_model.id), 0.0) > now_s
            for monitor, remote_model in self.loadable(model)
        )

    def loadable(self, model: str) -> list[tuple[NodeMonitor, RemoteModel]]:
        """Return the nodes that could load a model, each with its model there."""
        return [(monitor, found) for monitor, found, here in self._all_loadable() if here == model]

    def _all_loadable(self) -> Iterator[tuple[NodeMonitor, RemoteModel, str]]:
        local = self._nodes.local()
        for monitor in self._nodes:
            if monitor.is_up and monitor.node.settings.load == "idle":
                for remote_model in monitor.remote_models:
                    if not remote_model.is_loaded and (here := served_id(remote_model, local)):
                        yield monitor, remote_model, here

    def _loadable_now(self, model: str) -> list[tuple[NodeMonitor, RemoteModel]]:
        """Return the nodes that may be asked now, the least busy first."""
        found = [
            (monitor, remote_model)
            for monitor, remote_model in self.loadable(model)
            if remote_model.state == "unloaded"
            and self._refusals.reason(monitor.node.name, remote_model.id) is None
        ]
        in_flight = self._nodes.router.count_in_flight
        return sorted(found, key=lambda pair: sum(map(in_flight, pair[0].admitted)))

    def _waited_for(self) -> set[str]:
        """Return the models for which requests wait although an instance serves them."""
        models = {here for _, _, here in self._all_loadable()}
        demands = {model: self._nodes.router.demand(model) for model in models}
        return {
            model
            for model, demand in demands.items()
            if demand.waiting > demand.held_back and self._nodes.router.serves(model)
        }


def _message(body: bytes, status: int) -> str:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        message = None
    is_text = isinstance(message, str) and message.isprintable()
    return message[:_REASON_MAX_CHARACTERS] if is_text else f"it answered {status}"
