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

from proxy.engine.page import fetch, question
from proxy.engine.upstream import Upstream
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.headers import HOP
from proxy.line.dispatch import Dispatch
from proxy.loader import ModelCard
from proxy.nodes.cards import Offered, place_of
from proxy.nodes.offer import Offer, Unreadable, count_slots, read_offers
from proxy.nodes.settings import NodeSettings
from proxy.record import Tell
from proxy.settings import ProxySettings

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


class Watcher:
    """Looks after one node.

    Args:
        node: What is set for it.
        dispatch: Where its models are admitted.
        here: Tells the models that are configured here.
        settings: The proxy's limits.
        tell: Hears when it comes and goes.
        chance: Returns a number from 0 to 1, for the length of pauses.

    Attributes:
        node: As given.
        is_up: Whether it answered lately.
        trouble: Why it is not up.
    """

    def __init__(
        self,
        node: NodeSettings,
        dispatch: Dispatch,
        here: Callable[[], Sequence[ModelCard]],
        settings: ProxySettings,
        tell: Tell,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.node = node
        self.is_up = False
        self.trouble = "it was not asked yet"
        self._dispatch = dispatch
        self._here = here
        self._settings = settings
        self._tell = tell
        self._chance = chance
        self._failures = 0
        self._slots: dict[str, int] = {}
        self._offers: tuple[Offer, ...] = ()
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

    def doubt(self) -> None:
        """Note that it did not begin to answer a request: give it no more until it is asked."""
        self._failures = max(self._failures, _FAILURES - 1)
        self._withdraw_all()
        self._settled.clear()
        self._doubted.set()

    def leave(self) -> None:
        """Give it nothing more, for it is none of ours any longer; whoever waits for it goes on."""
        self.is_up, self.trouble = False, "it is not set any more"
        self._withdraw_all()
        self._settled.set()

    async def settled(self) -> None:
        """Wait until it is known whether it is there; the caller sets the deadline."""
        await self._settled.wait()

    def offered(self) -> list[Offered]:
        """Return the models that it offers, or did when it was last up."""
        name, trouble = self.node.name, None if self.is_up else self.trouble
        return [Offered(one, self._slots_of(one), name, trouble) for one in self._offers]

    def upstreams(self) -> Mapping[str, Upstream]:
        """Return its models that may be given requests, by the names of the instances."""
        return self._admitted

    # A look at it.

    async def _look(self) -> None:
        try:
            offers = await self._ask()
        except (UpstreamFailed, UpstreamTimeout, Unreadable) as error:
            self._failed(str(error).removeprefix(f"{self.node.name} "))
        else:
            self._answered(offers)

    async def _ask(self) -> tuple[Offer, ...]:
        page = await self._fetch("/v1/models")
        if page is None:
            raise Unreadable("it does not list its models at /v1/models")
        offers = read_offers(page, self.node.models)
        await self._ask_slots(offers)
        return offers

    async def _ask_slots(self, offers: Sequence[Offer]) -> None:
        """Find out how many slots the models have that are new and do not say it."""
        for offer in offers:
            if offer.slots is None and offer.id not in self._slots:
                # One that routes would load a model that left meanwhile.
                query = urlencode({"model": offer.id, "autoload": "false"})
                page = await self._fetch("/slots", query)
                if page is None:
                    return  # whoever has no such page has none for the next model either
                self._slots[offer.id] = count_slots(page) or self.node.slots

    async def _fetch(self, path: str, query: str = "") -> bytes | None:
        """Return a page; None where there is none."""
        letter = question(path, query, **{HOP: "1", "Accept": "application/json"})
        asked = self.node.upstream(self.node.name, "", "", 1)
        page = await fetch(asked, letter, self._settings, _LIMIT_S, _PAGE_MAX_BYTES)
        return page.body if page.status == 200 else None

    # What came of it. Nothing from here on waits.

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self.is_up and self._failures < _FAILURES:
            return
        self._withdraw_all()
        self._slots.clear()
        if self.is_up or self._failures == 1:
            self._tell("node.down", node=self.node.name, why=why)
        self.is_up, self.trouble = False, why

    def _answered(self, offers: tuple[Offer, ...]) -> None:
        self._failures = 0
        self._offers = offers
        if not self.is_up:
            self.is_up = True
            models = [offer.id for offer in offers]
            self._tell("node.up", node=self.node.name, models=models)
        wanted = {one.name: one for one in self._wanted(offers)}
        for name in self._admitted.keys() - wanted.keys():
            self._dispatch.withdraw(name)
        for name, upstream in wanted.items():
            if self._admitted.get(name) != upstream:
                self._dispatch.admit(upstream)
        self._admitted = wanted

    def _wanted(self, offers: Sequence[Offer]) -> Iterator[Upstream]:
        here = self._here()
        for offer in offers:
            if place := place_of(offer, here):
                name = f"{self.node.name}/{offer.id}"
                slots = self._slots_of(offer)
                yield self.node.upstream(name, offer.id, place, slots, offer.aliases)

    def _slots_of(self, offer: Offer) -> int:
        return offer.slots or self._slots.get(offer.id, self.node.slots)

    def _withdraw_all(self) -> None:
        for name in self._admitted:
            self._dispatch.withdraw(name)
        self._admitted = {}
