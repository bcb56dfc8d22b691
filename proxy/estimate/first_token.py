"""When a request gets its slot and its first token. Pure.

The engines compute what they have, and those that wait take free slots in their order, in virtual
time. What comes later is not known and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.estimate.costs import EngineCosts
from proxy.estimate.simulated_engine import SimulatedEngine, SimulatedRequest
from proxy.estimate.work import ModelWork, WaitingRequest


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from now; `queued_s` is when it gets a slot, loading included."""

    instance: str
    queued_s: float
    first_token_s: float

    def corrected(self, factor: float, ready_in_s: float) -> FirstToken:
        """Return it with all but the load multiplied."""
        queued_s, first_token_s = (
            ready_in_s + factor * (one - ready_in_s) for one in (self.queued_s, self.first_token_s)
        )
        return FirstToken(self.instance, queued_s, first_token_s)


def first_token(work: ModelWork, costs: EngineCosts) -> FirstToken | None:
    """Return None where no engine has a slot."""
    engines = [
        SimulatedEngine(one, costs, work.ready_in_s)
        for one in work.engines
        if one.free_slots or one.running
    ]
    if not engines:
        return None
    waiting = list(work.waiting)
    wanted, taken = work.waiting[work.place], None
    while taken is None or taken.request.first_token_s is None:
        if found := _next_assignment(engines, waiting):
            engine, one = found[0], waiting.pop(found[1])
            request = _take(engine, one)
            if one is wanted:
                taken = _Taken(engine, request, engine.now_s)
        else:
            _next_engine(engines, taken).step()
    return FirstToken(taken.engine.name, taken.queued_s, taken.request.first_token_s)


@dataclass(frozen=True, slots=True)
class _Taken:
    engine: SimulatedEngine
    request: SimulatedRequest
    queued_s: float


def _next_assignment(
    engines: Sequence[SimulatedEngine], waiting: Sequence[WaitingRequest]
) -> tuple[SimulatedEngine, int] | None:
    """Return the engine and the place of the first request that takes a free slot."""
    free = [one for one in engines if one.has_free_slot]
    for place, one in enumerate(waiting if free else ()):
        may = [engine for engine in free if one.instance in {None, engine.name}]
        if may:
            return min(may, key=lambda engine: (engine.now_s, one.new_on(engine.name))), place
    return None


def _next_engine(engines: Sequence[SimulatedEngine], taken: _Taken | None) -> SimulatedEngine:
    """Return the engine whose next pass ends first; once the request has a slot, its own."""
    if taken:
        return taken.engine
    return min((one for one in engines if not one.is_idle), key=lambda one: one.now_s)


def _take(engine: SimulatedEngine, waiting: WaitingRequest) -> SimulatedRequest:
    new_tokens = waiting.new_on(engine.name)
    cached = waiting.prompt_tokens - new_tokens
    slot = waiting.slots.get(engine.name)
    engine.now_s += engine.costs.overhead_s if engine.is_idle else 0.0
    return engine.take(new_tokens, cached, waiting.answer_tokens, slot)
