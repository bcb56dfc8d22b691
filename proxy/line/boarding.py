"""How a request comes to the slot that it should use, on an engine whose slots are followed.

Why it is done, and how slots are followed, stands in `proxy.home.berths`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from proxy.engine.slots import Reach, look, touch
from proxy.errors import UpstreamTimeout
from proxy.home.berths import Berth, Berths
from proxy.line.lease import Clock, Lease
from proxy.request import Ask
from proxy.settings import ProxySettings

# Fewer tokens than this are computed as quickly as they are put aside.
_WORTH_TOKENS: Final = 128


class Boarding:
    """One request on its way to a slot; made for a lease, used once.

    Args:
        lease: Its lease.
        berths: The slots of its instance.
        settings: How long the engine may take to tell of its slots.
        clock: Monotonic time.
    """

    def __init__(self, lease: Lease, berths: Berths, settings: ProxySettings, clock: Clock) -> None:
        self._lease = lease
        self._berths = berths
        self._settings = settings
        self._clock = clock

    async def board(self, reach: Reach) -> int | None:
        """Give the lease its berth; return the slot that its request should name, if any.

        To be done right before the request goes out: the order in which requests come decides
        which slots the engine gives them.

        Args:
            reach: How the request could come to a certain slot.
        """
        lease, talk = self._lease, self._lease.talk if reach is not Reach.NONE else None
        berth = self._berths.board(lease, talk, self._clock())
        if berth and berth.talk is not None:
            berth = await self._return(berth, reach)
        elif berth and talk is not None and self._begins_alike(berth):
            berth = await self._begin(berth)
        lease.berth = berth
        if berth is None:
            return None
        is_named = berth.is_sure and berth.talk is not None and reach is Reach.NAMED
        lease.is_proof = is_named and _looks_in_cache(lease.ask) and berth.proves(lease.ask.prompt)
        self._berths.depart(berth)
        return berth.slot if is_named else None

    async def _return(self, berth: Berth, reach: Reach) -> Berth | None:
        """Come back to the slot that holds the conversation, if it does."""
        if not berth.is_sure:
            await self._look(berth)
        if not berth.is_sure:
            return self._berths.change(berth, self._lease.talk, self._clock())
        if reach is Reach.LED:
            await self._touch(self._berths.pass_by(berth))
        return berth

    def _begins_alike(self, berth: Berth) -> bool:
        """Return whether a new conversation begins as another did that is not put aside yet."""
        return self._lease.expected_cached >= _WORTH_TOKENS and self._berths.is_unsaved(berth)

    async def _begin(self, berth: Berth) -> Berth:
        """Have what the other idle slots hold put aside, where the engine looks for beginnings.

        Any task makes it do so. One of no tokens in a slot that nobody comes back for puts aside
        what all others hold; used after it, they leave that slot to the request.
        """
        await self._look(berth)
        berth = self._berths.lead(berth)
        if berth.is_sure:
            await self._touch([berth.slot])
            await self._touch(self._berths.pass_by(berth))
        return berth

    async def _look(self, berth: Berth) -> None:
        with suppress(UpstreamTimeout):
            page = await look(self._lease.upstream, self._settings) or ()
            self._berths.confirm(page, berth, self._clock())

    async def _touch(self, slots: list[int]) -> None:
        await touch(self._lease.upstream, slots, self._settings)


def _looks_in_cache(ask: Ask) -> bool:
    return ask.members.get("cache_prompt") is not False
