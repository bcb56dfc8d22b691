"""Asks a node to load a model if no machine has it loaded, or if all that have it are busy.

Only nodes with `load = "idle"` in the settings are asked, and only for models that they list as
loadable; each decides whether it has room. They are asked one after the other, those with the
fewest requests first. A node that refuses is not asked again for a while.
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

from proxy.common.headers import HOP
from proxy.errors import Unavailable, UpstreamFailed, UpstreamTimeout
from proxy.nodes.model_list import RemoteModel
from proxy.nodes.monitor import NodeMonitor
from proxy.observe.record import Emit
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, fetch

_FIRST_S: Final = 30.0
_LAST_S: Final = 600.0
# Nodes come and go; the oldest refusal is forgotten first.
_REFUSALS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """Why a node does not load a model, and how often in a row it refused."""

    reason: str
    count: int
    until_s: float


def retry_delay_s(count: int) -> float:
    """Return the time until a node is asked again after `count` refusals in a row."""
    return min(_FIRST_S * 2.0 ** min(count - 1, 16), _LAST_S)


class LoadRefusals:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: dict[tuple[str, str], LoadRefusal] = {}

    def reason(self, node: str, model: str) -> str | None:
        """Return why a node must not be asked now; None: it may be."""
        refusal = self._refusals.get((node, model))
        return refusal.reason if refusal and self._clock() < refusal.until_s else None

    def add(self, node: str, model: str, reason: str) -> None:
        before = self._refusals.get((node, model))
        count = before.count + 1 if before else 1
        until_s = self._clock() + retry_delay_s(count)
        self._refusals.pop((node, model), None)
        self._refusals[node, model] = LoadRefusal(reason, count, until_s)
        if len(self._refusals) > _REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]

    def forget(self, node: str, model: str) -> None:
        self._refusals.pop((node, model), None)


# A node decides within 10 s.
_ASK_TIMEOUT_S: Final = 15.0
_ANSWER_MAX_BYTES: Final = 64 * 1024
# Time until a node that was asked lists the model as loading.
_BEGINS_S: Final = 5.0
# Interval of polls while a node loads a model.
_POLL_S: Final = 0.5
# Interval of looks for requests that wait for a model that another node could load.
_LOOK_S: Final = 2.0
_REASON_MAX_CHARACTERS: Final = 256
_RETRY_AFTER_S: Final = 30


# Models that nodes have not loaded, each with its node and its id here.
Offers = Callable[[], Iterable[tuple[NodeMonitor, RemoteModel, str]]]


@dataclass(frozen=True, slots=True)
class _Loadable:
    monitor: NodeMonitor
    remote_model: RemoteModel

    @property
    def key(self) -> tuple[str, str]:
        return self.monitor.node.name, self.remote_model.id


class RemoteLoading:
    """Has nodes load models; `offers` returns their models that are not loaded."""

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
                for loadable in self._loadable(model):
                    loadable.monitor.poll_now()

    async def serve(self) -> None:
        """Have another node load a model while requests wait for it, until cancelled."""
        waiting: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            before, waiting = waiting, self._waited_for()
            for model in before & waiting:
                if self._loadable_now(model) and not self._is_loading(model):
                    with suppress(Unavailable):  # requests wait for those that have it
                        await self._ask_one(model)

    async def _ask_one(self, model: str) -> None:
        """Have a node begin to load a model; raises Unavailable if none does."""
        for loadable in self._loadable_now(model):
            reason = await self._ask(loadable)
            node, remote_id = loadable.key
            if reason is None:
                self._refusals.forget(node, remote_id)
                self._asked_until_s[loadable.key] = self._clock() + _BEGINS_S
                self._emit("node.load_requested", node=node, model=remote_id)
                loadable.monitor.poll_now()
                return
            self._refusals.add(node, remote_id, reason)
            self._emit("node.load_refused", node=node, model=remote_id, reason=reason)
        reasons = [
            f"{loadable.key[0]}: {self._refusals.reason(*loadable.key)}"
            for loadable in self._loadable(model)
        ]
        raise Unavailable(
            f"{model} is unavailable: {'; '.join(reasons) or 'no node loads it'}", _RETRY_AFTER_S
        )

    async def _ask(self, loadable: _Loadable) -> str | None:
        """Ask a node; return why it does not load the model."""
        node, body = loadable.monitor.node, orjson.dumps({"model": loadable.remote_model.id})
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

    def _is_loading(self, model: str) -> bool:
        """Return whether a node loads a model, or has agreed to it moments ago."""
        now_s = self._clock()
        return any(
            loadable.remote_model.state == "loading"
            or self._asked_until_s.get(loadable.key, 0.0) > now_s
            for loadable in self._loadable(model)
        )

    def _loadable(self, model: str) -> list[_Loadable]:
        return [loadable for here, loadable in self._all_loadable() if here == model]

    def _all_loadable(self) -> Iterator[tuple[str, _Loadable]]:
        for monitor, remote_model, here in self._offers():
            is_asked = monitor.is_up and monitor.node.settings.load == "idle"
            if is_asked and not remote_model.is_loaded:
                yield here, _Loadable(monitor, remote_model)

    def _loadable_now(self, model: str) -> list[_Loadable]:
        """Return the nodes that may be asked now, the least busy first."""
        found = [
            loadable
            for loadable in self._loadable(model)
            if loadable.remote_model.state == "unloaded"
            and self._refusals.reason(*loadable.key) is None
        ]
        return sorted(
            found,
            key=lambda loadable: sum(
                map(self._router.count_in_flight, loadable.monitor.upstreams())
            ),
        )

    def _waited_for(self) -> set[str]:
        """Return the models for which requests wait although an instance serves them."""
        models = {here for here, _ in self._all_loadable()}
        demands = {model: self._router.demand(model) for model in models}
        return {
            model
            for model, demand in demands.items()
            if demand.waiting > demand.held_back and self._router.serves(model)
        }


def _message(body: bytes, status: int) -> str:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        message = None
    is_text = isinstance(message, str) and message.isprintable()
    return message[:_REASON_MAX_CHARACTERS] if is_text else f"it answered {status}"
