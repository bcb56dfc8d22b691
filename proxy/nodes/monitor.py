"""Watches one node: what it offers, and whether it is there at all.

It is asked for its models every five seconds, and what it offers may be given requests from then
on. Two failures in a row, or one after a request that it did not begin to answer, and it is given
nothing more until it answers again; it is asked ever more rarely meanwhile, once a minute at last.
What it holds goes on: those requests find out for themselves. All changes happen in methods without
`await`.
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
from proxy.models import ModelInfo
from proxy.nodes.merge import OfferedModel, place_of
from proxy.nodes.model_list import RemoteModel, Unreadable, count_slots, read_remote_models
from proxy.nodes.settings import ConfiguredNode
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.fetch import fetch, get_request
from proxy.upstream.upstream import Upstream

_INTERVAL_S: Final = 5.0
_FIRST_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_LIMIT_S: Final = 5.0
_PAGE_MAX_BYTES: Final = 4 * 1024**2
_FAILURES: Final = 2


def pause_s(failures: int, chance: float) -> float:
    """Return how long to wait before a node is asked again.

    Args:
        failures: How many times in a row it has failed by now.
        chance: 0 to 1: up to a tenth more or less, so that many do not ask at once.
    """
    wait_s = _INTERVAL_S
    if failures:
        wait_s = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), _RETRY_MAX_S)
    return wait_s * (0.9 + 0.2 * chance)


class NodeMonitor:
    """Looks after one node.

    Args:
        node: What is set for it.
        router: Where its models are admitted.
        here: Tells the models that are configured here.
        settings: The proxy's limits.
        tell: Hears when it comes and goes.
        chance: Returns a number from 0 to 1, for the length of pauses.

    Attributes:
        node: As given.
        is_up: Whether it answered lately.
        problem: Why it is not up.
    """

    def __init__(
        self,
        node: ConfiguredNode,
        router: Router,
        here: Callable[[], Sequence[ModelInfo]],
        settings: ProxySettings,
        tell: Emit,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.node = node
        self.is_up = False
        self.problem = "it was not asked yet"
        self._router = router
        self._here = here
        self._settings = settings
        self._tell = tell
        self._chance = chance
        self._failures = 0
        self._slots: dict[str, int] = {}
        self._remote_models: tuple[RemoteModel, ...] = ()
        self._admitted: dict[str, Upstream] = {}
        self._doubted = asyncio.Event()
        self._settled = asyncio.Event()

    async def serve(self) -> None:
        """Watch, until cancelled."""
        while True:
            self._doubted.clear()
            await self._look()
            if not self._doubted.is_set():
                self._settled.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s(self._failures, self._chance())):
                    await self._doubted.wait()

    def mark_suspect(self) -> None:
        """Note that it did not begin to answer a request: give it no more until it is asked."""
        self._failures = max(self._failures, _FAILURES - 1)
        self._withdraw_all()
        self._settled.clear()
        self._doubted.set()

    def stop(self) -> None:
        """Give it nothing more, for it is none of ours any longer; whoever waits for it goes on."""
        self.is_up, self.problem = False, "it is not set any more"
        self._withdraw_all()
        self._settled.set()

    async def wait_checked(self) -> None:
        """Wait until it is known whether it is there; the caller sets the deadline."""
        await self._settled.wait()

    def offered(self) -> list[OfferedModel]:
        """Return the models that it offers, or did when it was last up."""
        name, trouble = self.node.name, None if self.is_up else self.problem
        return [
            OfferedModel(one, self._slots_of(one), name, trouble) for one in self._remote_models
        ]

    def upstreams(self) -> Mapping[str, Upstream]:
        """Return its models that may be given requests, by the names of the instances."""
        return self._admitted

    # A look at it.

    async def _look(self) -> None:
        try:
            remote_models = await self._ask()
        except (UpstreamFailed, UpstreamTimeout, Unreadable) as error:
            self._failed(str(error).removeprefix(f"{self.node.name} "))
        else:
            self._answered(remote_models)

    async def _ask(self) -> tuple[RemoteModel, ...]:
        page = await self._fetch("/v1/models")
        if page is None:
            raise Unreadable("it does not list its models at /v1/models")
        remote_models = read_remote_models(page, self.node.settings.models)
        await self._ask_slots(remote_models)
        return remote_models

    async def _ask_slots(self, remote_models: Sequence[RemoteModel]) -> None:
        """Find out how many slots the models have that are new and do not say it."""
        for remote_model in remote_models:
            if remote_model.slots is None and remote_model.id not in self._slots:
                # One that routes would load a model that left meanwhile.
                query = urlencode({"model": remote_model.id, "autoload": "false"})
                page = await self._fetch("/slots", query)
                if page is None:
                    return  # whoever has no such page has none for the next model either
                self._slots[remote_model.id] = count_slots(page) or self.node.settings.slots

    async def _fetch(self, path: str, query: str = "") -> bytes | None:
        """Return a page; None where there is none."""
        upstream_request = get_request(path, query, **{HOP: "1", "Accept": "application/json"})
        asked = self.node.upstream(self.node.name, "", "", 1)
        page = await fetch(asked, upstream_request, self._settings, _LIMIT_S, _PAGE_MAX_BYTES)
        return page.body if page.status == 200 else None

    # What came of it. Nothing from here on waits.

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self.is_up and self._failures < _FAILURES:
            return
        self._withdraw_all()
        self._slots.clear()
        if self.is_up or self._failures == 1:
            self._tell("node.down", node=self.node.name, reason=reason)
        self.is_up, self.problem = False, reason

    def _answered(self, remote_models: tuple[RemoteModel, ...]) -> None:
        self._failures = 0
        self._remote_models = remote_models
        if not self.is_up:
            self.is_up = True
            models = [remote_model.id for remote_model in remote_models]
            self._tell("node.up", node=self.node.name, models=models)
        wanted = {one.name: one for one in self._wanted(remote_models)}
        for name in self._admitted.keys() - wanted.keys():
            self._router.withdraw(name)
        for name, upstream in wanted.items():
            if self._admitted.get(name) != upstream:
                self._router.admit(upstream)
        self._admitted = wanted

    def _wanted(self, remote_models: Sequence[RemoteModel]) -> Iterator[Upstream]:
        here = self._here()
        for remote_model in remote_models:
            if place := place_of(remote_model, here):
                name = f"{self.node.name}/{remote_model.id}"
                slots = self._slots_of(remote_model)
                yield self.node.upstream(name, remote_model.id, place, slots, remote_model.aliases)

    def _slots_of(self, remote_model: RemoteModel) -> int:
        return remote_model.slots or self._slots.get(remote_model.id, self.node.settings.slots)

    def _withdraw_all(self) -> None:
        for name in self._admitted:
            self._router.withdraw(name)
        self._admitted = {}
