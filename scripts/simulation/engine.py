"""An engine that only counts: its cache, and how long it takes in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from proxy.upstream.upstream import Timings
from scripts.simulation.workload import Turn

SLOTS: Final = 4
PREFILL_TPS: Final = 1500.0
DECODE_TPS: Final = 60.0
# A pass over another sequence takes this much longer.
_PASS_SHARE: Final = 0.1
# Of all conversations that it holds, in its slots and in `--cache-ram`.
_CACHE_TOKENS: Final = 64_000


class NodeLost(Exception):
    """Its machine is gone."""


class Engine:
    """One node.

    It computes one prompt after the other, and holds the conversations used last, with their system
    prompts.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._conversations: OrderedDict[int, Turn] = OrderedDict()
        self._systems: Counter[int] = Counter()
        self._cached_tokens = 0
        self._prefilled_at_s = 0.0
        self._decoding = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order

    def cached(self, turn: Turn) -> int:
        """Return how many tokens of a prompt its cache has."""
        if held := self._conversations.get(turn.conversation):
            return held.tokens + held.answer_tokens
        return turn.system_tokens if self._systems[turn.system] else 0

    async def answer(self, turn: Turn, on_first_token: Callable[[], None]) -> Timings:
        """Raises NodeLost."""
        clock = asyncio.get_running_loop().time
        cached = self.cached(turn)
        new_tokens = max(1, turn.tokens - cached)
        prefill_s = new_tokens / PREFILL_TPS / self._speed
        self._prefilled_at_s = max(clock(), self._prefilled_at_s) + prefill_s
        await self._wait(self._prefilled_at_s - clock())
        on_first_token()
        self._hold(turn)
        self._decoding += 1
        pass_s = (1 + _PASS_SHARE * (self._decoding - 1)) / DECODE_TPS / self._speed
        try:
            await self._wait(turn.answer_tokens * pass_s)
        finally:
            self._decoding -= 1
        decode_ms = 1000 * turn.answer_tokens * pass_s
        return Timings(cached, new_tokens, 1000 * prefill_s, turn.answer_tokens, decode_ms)

    def take(self, turn: Turn) -> int:
        """Return how many tokens of a conversation it has, and forget them."""
        if (held := self._conversations.pop(turn.conversation, None)) is None:
            return 0
        self._count(held, -1)
        return held.tokens + held.answer_tokens

    def lose(self) -> None:
        """End all that it computes."""
        for future in tuple(self._waiting):
            if not future.done():
                future.set_exception(NodeLost())

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = None
        timer = loop.call_later(seconds, _end, future)
        try:
            await future
        finally:
            timer.cancel()
            del self._waiting[future]

    def _hold(self, turn: Turn) -> None:
        before = self._conversations.pop(turn.conversation, None)
        self._conversations[turn.conversation] = turn
        self._count(turn, 1)
        if before:
            self._count(before, -1)
        while self._cached_tokens > _CACHE_TOKENS:
            self._count(self._conversations.popitem(last=False)[1], -1)

    def _count(self, turn: Turn, change: int) -> None:
        self._cached_tokens += change * (turn.tokens + turn.answer_tokens)
        self._systems[turn.system] += change


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
