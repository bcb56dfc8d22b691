"""An engine that only counts: its cache, and how long it takes in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapreplace
from typing import Final

from proxy.upstream.upstream import Timings
from scripts.simulation.workload import Turn


class NodeLost(Exception):
    """Its machine is gone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The speeds and sizes of one node.

    Attributes:
        pass_share: By how much of its time a pass takes longer for each further sequence.
        cache_tokens: Tokens of all conversations that it holds, in its slots and in `--cache-ram`.
        is_paged: Whether conversations share the memory of their beginning, as in vLLM; the tokens
            of an answer are then the first to be forgotten.
    """

    slots: int = 4
    prefill_tps: float = 1500.0
    decode_tps: float = 60.0
    pass_share: float = 0.1
    cache_tokens: int = 64_000
    is_paged: bool = False

    @property
    def answers_tps(self) -> float:
        """Tokens per second of all its slots together."""
        return self.slots * self.decode_tps / (1 + self.pass_share * (self.slots - 1))


SMALL: Final = Machine()


@dataclass(frozen=True, slots=True)
class Plan:
    """When and how an engine answers a request; times are those of the loop."""

    cached_tokens: int
    new_tokens: int
    prefilled_at_s: float
    first_token_s: float
    ends_s: float


class Engine:
    """One node.

    It computes one prompt after the other, and holds the conversations used last, with their system
    prompts. Requests beyond its slots wait in it, in their order. All that is to come is known at
    any moment, because later requests change nothing for earlier ones.
    """

    def __init__(self, machine: Machine, speed: float) -> None:
        self._machine = machine
        self._speed = speed
        self._conversations: OrderedDict[int, Turn] = OrderedDict()
        self._systems: Counter[int] = Counter()
        self._cached_tokens = 0
        self._prefilled_at_s = 0.0
        self._free_at_s = [0.0] * machine.slots  # a heap
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order

    def cached(self, turn: Turn) -> int:
        """Return how many tokens of a prompt its cache has."""
        if held := self._conversations.get(turn.conversation):
            return min(held.tokens + held.answer_tokens, turn.tokens - 1)
        return turn.system_tokens if self._systems[turn.system] else 0

    def has_free_slot(self, now_s: float) -> bool:
        return self._free_at_s[0] <= now_s

    def plan(self, turn: Turn, now_s: float) -> Plan:
        """Return how it would answer a request that came now."""
        machine, cached = self._machine, self.cached(turn)
        new_tokens = turn.tokens - cached
        prefill_s = new_tokens / machine.prefill_tps / self._speed
        prefilled_at_s = max(now_s, self._free_at_s[0], self._prefilled_at_s) + prefill_s
        beside = sum(free_at_s > prefilled_at_s for free_at_s in self._free_at_s)
        pass_s = (1 + machine.pass_share * beside) / machine.decode_tps / self._speed
        ends_s = prefilled_at_s + turn.answer_tokens * pass_s
        return Plan(cached, new_tokens, prefilled_at_s, prefilled_at_s + pass_s, ends_s)

    async def answer(self, turn: Turn, on_first_token: Callable[[], None]) -> Timings:
        """Raises NodeLost."""
        plan = self.plan(turn, asyncio.get_running_loop().time())
        self._prefilled_at_s = plan.prefilled_at_s
        heapreplace(self._free_at_s, plan.ends_s)
        self._hold(turn)
        await self._wait_until(plan.first_token_s)
        on_first_token()
        await self._wait_until(plan.ends_s)
        prefill_ms = 1000 * plan.new_tokens / self._machine.prefill_tps / self._speed
        decode_ms = 1000 * (plan.ends_s - plan.prefilled_at_s)
        return Timings(
            plan.cached_tokens, plan.new_tokens, prefill_ms, turn.answer_tokens, decode_ms
        )

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

    async def _wait_until(self, at_s: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = None
        timer = loop.call_at(at_s, _end, future)
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
        while self._cached_tokens > self._machine.cache_tokens:
            self._count(self._conversations.popitem(last=False)[1], -1)

    def _count(self, turn: Turn, change: int) -> None:
        before, now = self._systems[turn.system], self._systems[turn.system] + change
        self._systems[turn.system] = now
        if self._machine.is_paged:
            self._cached_tokens += change * (turn.tokens - turn.system_tokens)
            self._cached_tokens += (bool(now) - bool(before)) * turn.system_tokens
        else:
            self._cached_tokens += change * (turn.tokens + turn.answer_tokens)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
