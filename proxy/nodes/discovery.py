"""Follows the records of a node's name: its addresses come and go with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from proxy.access_log import Emit
from proxy.nodes.addresses import Answer, Known, NodeAddress, after

Resolve = Callable[[], Awaitable[Answer]]


class Discovery:
    """The addresses of one name.

    Args:
        name: Of the node in the settings.
        resolve: Asks for the records once.
        on_change: Gets all addresses when they have changed.
        emit: Takes `node.resolved` and `node.unresolved`.
        room: Returns how many addresses other names leave.
    """

    def __init__(
        self,
        name: str,
        resolve: Resolve,
        on_change: Callable[[Sequence[NodeAddress]], None],
        emit: Emit,
        room: Callable[[], int],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.known = Known()
        self._name = name
        self._resolve = resolve
        self._on_change = on_change
        self._emit = emit
        self._room = room
        self._chance = chance

    async def serve(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            self._take(await self._resolve())
            # Machines that started together do not ask together.
            await asyncio.sleep(self.known.pause_s * (0.9 + 0.1 * self._chance()))

    # No method below awaits.

    def _take(self, answer: Answer) -> None:
        before, self.known = self.known, after(self.known, answer, self._room())
        added = set(self.known.addresses) - set(before.addresses)
        removed = set(before.addresses) - set(self.known.addresses)
        if added or removed:
            self._emit(
                "node.resolved",
                node=self._name,
                added=[str(one) for one in sorted(added)],
                removed=[str(one) for one in sorted(removed)],
                addresses=len(self.known.addresses),
            )
            self._on_change(self.known.addresses)
        if self.known.problem and self.known.problem != before.problem:
            self._emit("node.unresolved", node=self._name, reason=self.known.problem)
