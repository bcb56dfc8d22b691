"""Has nodes load models: one that no machine has loaded, or one more where all of those are busy.

Only nodes that the settings say this of are asked (`load = "idle"`), and only for models that they
list as loadable: each decides for itself whether it has room. They are asked one after the other,
those with the fewest requests first. One that refuses is not asked again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import orjson
from multidict import CIMultiDict

from proxy.access_log import Emit
from proxy.errors import Unavailable, UpstreamFailed, UpstreamTimeout
from proxy.headers import HOP
from proxy.nodes.load_refusals import LoadRefusals
from proxy.nodes.model_list import RemoteModel
from proxy.nodes.monitor import NodeMonitor
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, fetch

# A node decides within 10 s.
_ASK_TIMEOUT_S: Final = 15.0
_ANSWER_MAX_BYTES: Final = 64 * 1024
# Until a node that was asked lists the model as loading.
_BEGINS_S: Final = 5.0
# While a node loads a model, it is polled so often.
_POLL_S: Final = 0.5
# How often to look whether requests wait for a model that one more node could load.
_LOOK_S: Final = 2.0
_REASON_MAX_CHARACTERS: Final = 256
_RETRY_AFTER_S: Final = 30


# The models that nodes have not loaded, each with its node and its id here.
Offers = Callable[[], Iterable[tuple[NodeMonitor, RemoteModel, str]]]


@dataclass(frozen=True, slots=True)
class _Loadable:
    monitor: NodeMonitor
    remote_model: RemoteModel

    @property
    def key(self) -> tuple[str, str]:
        return self.monitor.node.name, self.remote_model.id


class RemoteLoading:
    """Args: `offers`: the models that nodes have, loaded or not."""

    def __init__(
        self,
        router: Router,
        settings: ProxySettings,
        offers: Offers,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._settings = settings
        self._offers = offers
        self._emit = emit
        self._clock = clock
        self._refusals = LoadRefusals(clock)
        self._locks: dict[str, asyncio.Lock] = {}
        self._asked_until_s: dict[tuple[str, str], float] = {}

    def has_loadable(self, model: str) -> bool:
        """Return whether a node may be asked to load a model, or loads it."""
        return bool(self._loadable(model))

    async def load(self, model: str) -> None:
        """Return once an instance of a model is admitted; the caller has a deadline.

        Raises:
            Unavailable: No node loads it.
        """
        async with self._locks.setdefault(model, asyncio.Lock()):
            while not self._router.serves(model):
                if not self._is_loading(model):
                    await self._ask_one(model)
                await asyncio.sleep(_POLL_S)
                for one in self._loadable(model):
                    one.monitor.poll_now()

    async def serve(self) -> None:
        """Have one more node load a model while requests wait for it, until cancelled."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            before, waiting = waiting, self._waited_for()
            for model in before & waiting:
                if self._allowed(model) and not self._is_loading(model):
                    with suppress(Unavailable):  # requests wait for those that have it
                        await self._ask_one(model)

    async def _ask_one(self, model: str) -> None:
        """Have a node begin to load a model; raises Unavailable if none does."""
        for one in self._allowed(model):
            reason = await self._ask(one)
            if reason is None:
                self._accepted(one)
                return
            self._refused(one, reason)
        reasons = [
            f"{one.key[0]}: {self._refusals.reason(*one.key)}" for one in self._loadable(model)
        ]
        raise Unavailable(
            f"{model} is unavailable: {'; '.join(reasons) or 'no node loads it'}", _RETRY_AFTER_S
        )

    async def _ask(self, one: _Loadable) -> str | None:
        """Ask a node; return why it does not load the model."""
        node, body = one.monitor.node, orjson.dumps({"model": one.remote_model.id})
        headers = CIMultiDict({HOP: "1", "Content-Type": "application/json"})
        request = UpstreamRequest("POST", "/models/load", "", headers, body)
        upstream = node.upstream(node.name, "", "", 1)
        try:
            answer = await fetch(
                upstream, request, self._settings, _ASK_TIMEOUT_S, _ANSWER_MAX_BYTES
            )
        except (UpstreamFailed, UpstreamTimeout) as error:
            return str(error)
        return None if answer.status == 200 else _message(answer.body, answer.status)

    # No method below awaits.

    def _accepted(self, one: _Loadable) -> None:
        node, model = one.key
        self._refusals.forget(node, model)
        self._asked_until_s[one.key] = self._clock() + _BEGINS_S
        self._emit("node.load_requested", node=node, model=model)
        one.monitor.poll_now()

    def _refused(self, one: _Loadable, reason: str) -> None:
        node, model = one.key
        self._refusals.add(node, model, reason)
        self._emit("node.load_refused", node=node, model=model, reason=reason)

    def _is_loading(self, model: str) -> bool:
        """Return whether a node loads a model, or may not say so yet."""
        now_s = self._clock()
        return any(
            one.remote_model.state == "loading" or self._asked_until_s.get(one.key, 0.0) > now_s
            for one in self._loadable(model)
        )

    def _loadable(self, model: str) -> list[_Loadable]:
        return [loadable for here, loadable in self._all_loadable() if here == model]

    def _all_loadable(self) -> Iterator[tuple[str, _Loadable]]:
        for monitor, remote_model, here in self._offers():
            is_asked = monitor.is_up and monitor.node.settings.load == "idle"
            if is_asked and not remote_model.is_loaded:
                yield here, _Loadable(monitor, remote_model)

    def _allowed(self, model: str) -> list[_Loadable]:
        """Return those that may be asked now, the least busy first."""
        found = [
            one
            for one in self._loadable(model)
            if one.remote_model.state == "unloaded" and self._refusals.reason(*one.key) is None
        ]
        return sorted(found, key=lambda one: self._in_flight(one.monitor))

    def _in_flight(self, monitor: NodeMonitor) -> int:
        return sum(self._router.in_flight(name) for name in monitor.upstreams())

    def _waited_for(self) -> set[str]:
        """Return the models for which requests wait although an instance serves them."""
        models = {here for here, _ in self._all_loadable()}
        demands = {model: self._router.demand(model) for model in models}
        return {
            model
            for model, demand in demands.items()
            if demand.waiting > demand.held and self._router.serves(model)
        }


def _message(body: bytes, status: int) -> str:
    """Return why a node refused, by its error."""
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        message = None
    is_text = isinstance(message, str) and message.isprintable()
    return message[:_REASON_MAX_CHARACTERS] if is_text else f"it answered {status}"
