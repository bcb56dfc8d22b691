"""Monitors one node: whether it is up, and which models it offers.

It is polled every 5 s, and its models are admitted to the router. After two consecutive failures,
or one right after a request that it did not begin to answer, they are withdrawn until it answers
again; meanwhile polls back off up to once a minute. In-flight requests are not cut. State changes
only in methods without `await`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlencode

from proxy.access_log import Emit
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.headers import HOP
from proxy.models import ModelNames
from proxy.nodes.model_list import (
    OfferedModel,
    RemoteModel,
    Unreadable,
    count_slots,
    read_remote_models,
    served_id,
)
from proxy.nodes.settings import ConfiguredNode
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import fetch, get_request
from proxy.upstream.upstream import Upstream

_INTERVAL_S: Final = 5.0
_FIRST_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 4 * 1024**2
_FAILURES: Final = 2


def pause_s(failures: int, chance: float) -> float:
    """The time until the next poll; `chance` from 0 to 1 varies it by a tenth either way."""
    wait_s = _INTERVAL_S
    if failures:
        wait_s = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), _RETRY_MAX_S)
    return wait_s * (0.9 + 0.2 * chance)


class NodeMonitor:
    """Polls one node; `problem` is why it is not up."""

    def __init__(
        self,
        node: ConfiguredNode,
        router: Router,
        local: Callable[[], ModelNames],
        settings: ProxySettings,
        emit: Emit,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.node = node
        self.is_up = False
        self.problem = "it was not polled yet"
        self._router = router
        self._local = local
        self._settings = settings
        self._emit = emit
        self._chance = chance
        self._failures = 0
        self._slots: dict[str, int] = {}
        self.remote_models: tuple[RemoteModel, ...] = ()
        self._admitted: dict[str, Upstream] = {}
        self._suspected = asyncio.Event()
        self._checked = asyncio.Event()

    async def serve(self) -> None:
        """Poll until cancelled."""
        while True:
            self._suspected.clear()
            await self._poll()
            if not self._suspected.is_set():
                self._checked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s(self._failures, self._chance())):
                    await self._suspected.wait()

    def mark_suspect(self) -> None:
        """It did not begin to answer a request: withdraw its models and poll it now."""
        self._failures = max(self._failures, _FAILURES - 1)
        self._withdraw_all()
        self._checked.clear()
        self._suspected.set()

    def stop(self) -> None:
        """It is no longer configured: withdraw its models and release waiting requests."""
        self.is_up, self.problem = False, "it is no longer configured"
        self._withdraw_all()
        self._checked.set()

    async def wait_checked(self) -> None:
        """Wait until a poll has ended; the caller has a deadline."""
        await self._checked.wait()

    def offered(self) -> list[OfferedModel]:
        """The models of the last successful poll."""
        name, problem = self.node.name, None if self.is_up else self.problem
        return [OfferedModel(one, self._slots_of(one), name, problem) for one in self.remote_models]

    def upstreams(self) -> Mapping[str, Upstream]:
        """Its admitted models, by instance name."""
        return self._admitted

    async def _poll(self) -> None:
        try:
            remote_models = await self._read_models()
        except (UpstreamFailed, UpstreamTimeout, Unreadable) as error:
            self._failed(str(error).removeprefix(f"{self.node.name} "))
        else:
            self._answered(remote_models)

    async def _read_models(self) -> tuple[RemoteModel, ...]:
        body = await self._fetch("/v1/models")
        if body is None:
            raise Unreadable("it does not list its models at /v1/models")
        remote_models = read_remote_models(body, self.node.settings.models)
        await self._read_slots(remote_models)
        return remote_models

    async def _read_slots(self, remote_models: Sequence[RemoteModel]) -> None:
        """Count the slots of new models that do not report them."""
        for remote_model in remote_models:
            if remote_model.slots is None and remote_model.id not in self._slots:
                # Without autoload=false, a llama-server in router mode would load the model.
                query = urlencode({"model": remote_model.id, "autoload": "false"})
                body = await self._fetch("/slots", query)
                if body is None:
                    return  # the endpoint is missing for all models
                self._slots[remote_model.id] = count_slots(body) or self.node.settings.slots

    async def _fetch(self, path: str, query: str = "") -> bytes | None:
        """The body; None if the status is not 200."""
        request = get_request(path, query, **{HOP: "1", "Accept": "application/json"})
        upstream = self.node.upstream(self.node.name, "", "", 1)
        response = await fetch(upstream, request, self._settings, _TIMEOUT_S, _MAX_BYTES)
        return response.body if response.status == 200 else None

    # No method below awaits.

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self.is_up and self._failures < _FAILURES:
            return
        self._withdraw_all()
        self._slots.clear()
        if self.is_up or self._failures == 1:
            self._emit("node.down", node=self.node.name, reason=reason)
        self.is_up, self.problem = False, reason

    def _answered(self, remote_models: tuple[RemoteModel, ...]) -> None:
        self._failures = 0
        self.remote_models = remote_models
        if not self.is_up:
            self.is_up = True
            models = [remote_model.id for remote_model in remote_models]
            self._emit("node.up", node=self.node.name, models=models)
        upstreams = {one.name: one for one in self._upstreams(remote_models)}
        for name in self._admitted.keys() - upstreams.keys():
            self._router.withdraw(name)
        for name, upstream in upstreams.items():
            if self._admitted.get(name) != upstream:
                self._router.admit(upstream)
        self._admitted = upstreams

    def _upstreams(self, remote_models: Sequence[RemoteModel]) -> Iterator[Upstream]:
        local = self._local()
        for remote_model in remote_models:
            if model := served_id(remote_model, local):
                name = f"{self.node.name}/{remote_model.id}"
                slots = self._slots_of(remote_model)
                yield self.node.upstream(
                    name,
                    remote_model.id,
                    model,
                    slots,
                    remote_model.aliases,
                    remote_model.variants,
                )

    def _slots_of(self, remote_model: RemoteModel) -> int:
        return remote_model.slots or self._slots.get(remote_model.id, self.node.settings.slots)

    def _withdraw_all(self) -> None:
        for name in self._admitted:
            self._router.withdraw(name)
        self._admitted = {}
