"""Simulates engines to find when a request gets its slot and its first token. Pure.

The engines compute their present work in virtual time, and waiting requests take free slots in
order. Later requests are unknown and ignored. A pass computes one token of each answer, then prompt
tokens, slot by slot in the order of their numbers, until the batch is full: the prompt of a low
slot goes before that of a high slot. The time of a token grows with the tokens before it, and so
does the time of a pass, even with few prompt tokens.

Source: llama-server, build 10434, `update_slots` of tools/server/server-context.cpp.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from proxy.upstream.upstream import BATCH_TOKENS

# The regressors of a prompt's time: 1, its tokens, the sums of the tokens before each token and
# before each pass.
PromptRow = tuple[float, float, float, float]
# The regressors of the time of a pass with answers: 1, the answers, the tokens before each.
AnswerRow = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The time that an engine takes, in seconds."""

    prompt: PromptRow  # Seconds per unit of `PromptRow`.
    answer: AnswerRow  # Seconds per unit of `AnswerRow`.
    overhead_s: float = 0.0  # From the lease of a slot until an idle engine begins with the prompt.

    def prompt_s(self, row: PromptRow) -> float:
        return sum(a * b for a, b in zip(self.prompt, row, strict=True))

    def answer_s(self, row: AnswerRow) -> float:
        return sum(a * b for a, b in zip(self.answer, row, strict=True))


def prompt_row(tokens: float, depth: float, batch_tokens: int, prompts: float = 1.0) -> PromptRow:
    """Return the row of tokens after `depth` others; `prompts` is their share of a prompt."""
    passes = math.ceil(tokens / batch_tokens)
    before_passes = passes * depth + batch_tokens * passes * (passes - 1) / 2
    return prompts, tokens, tokens * (depth + tokens / 2), before_passes


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that has a slot."""

    slot: int  # The engine's number of the slot; a guess if the engine chose it.
    prompt_tokens: int  # Prompt tokens left to compute.
    depth: int  # Tokens before these, or before those of the answer.
    answer_tokens: float  # Expected number of tokens left to generate.
    first_token_s: float | None = None  # Set by a simulation once the prompt is computed.


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that has no slot yet."""

    prompt_tokens: int  # Tokens of the whole prompt.
    answer_tokens: float
    # Prompt tokens to compute on an instance with nothing in its cache; None: all.
    uncached_tokens: int | None = None
    # Prompt tokens to compute on instances with a part in their cache, by name.
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    instance: str | None = None  # The only instance whose slot it takes; None: any.
    # The slot that holds its conversation, by instance.
    slots: Mapping[str, int] = field(default_factory=dict)

    def new_on(self, instance: str) -> int:
        """Return the prompt tokens that an instance has to compute."""
        uncached = self.prompt_tokens if self.uncached_tokens is None else self.uncached_tokens
        return self.new_tokens.get(instance, uncached)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """An instance and its requests."""

    name: str
    batch_tokens: int  # The most tokens in one pass.
    running: tuple[RunningRequest, ...] = ()
    free_slots: tuple[int, ...] = ()  # In the order in which the engine takes them.
    weight: float = 1.0  # Its speed as a multiple of an average instance's.


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The engines of a model, and all requests that wait, in the order of their turns."""

    engines: tuple[EngineWork, ...]
    waiting: tuple[WaitingRequest, ...]
    place: int  # The place of the estimated request in `waiting`, from 0.
    # When the engines begin: after the load of the model, if it is not loaded.
    ready_in_s: float = 0.0

    @property
    def others(self) -> int:
        return len(self.waiting) - 1 + sum(len(engine.running) for engine in self.engines)


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """The load of a model that no instance serves."""

    # Seconds until it serves; None if it was never loaded, or the time is unknown now.
    in_s: float | None
    evicts: tuple[str, ...] = ()  # The models that would be unloaded for it.
    instances: int = 1  # The number of instances that would start.
    slots: int = 1  # The slots of each instance.
    batch_tokens: int = BATCH_TOKENS  # The most tokens in one pass of each instance.
    refusal: str | None = None  # Why it would not be loaded; None: it would.


class LoadForecaster(Protocol):
    def load_forecast(self, model: str, /) -> LoadForecast | None:
        """Return the load that a request would cause; None: it is not a model of this machine.

        Loads nothing, and takes at most milliseconds.
        """


_HALF: Final = 0.5


class SimulatedEngine:
    """An engine in virtual time; `begins_s` is the time of its first pass."""

    def __init__(self, work: EngineWork, costs: EngineCosts, begins_s: float) -> None:
        self.name = work.name
        self.now_s = begins_s  # The end of its latest pass, from the moment of the estimate.
        self._batch_tokens = work.batch_tokens
        self.costs = costs
        self._weight = work.weight
        self.free = deque(work.free_slots)
        self.requests = [replace(request) for request in work.running]
        if self.requests:  # assume that half of the current pass is over
            before_s = self.now_s
            self.step(passes_max=1)
            self.now_s -= _HALF * (self.now_s - before_s)

    def take(
        self, prompt_tokens: int, depth: int, answer_tokens: float, slot: int | None
    ) -> RunningRequest:
        """Give a request a free slot, if possible the given one."""
        given = self.free[0] if slot is None or slot not in self.free else slot
        self.free.remove(given)
        taken = RunningRequest(given, prompt_tokens, depth, answer_tokens)
        self.requests.append(taken)
        return taken

    def step(self, passes_max: float = math.inf) -> None:
        """Compute passes until something changes."""
        answers = [request for request in self.requests if not request.prompt_tokens]
        prompts = sorted(
            (request for request in self.requests if request.prompt_tokens),
            key=lambda request: request.slot,
        )
        if answers:
            passes_max = min(
                passes_max, math.ceil(min(request.answer_tokens for request in answers))
            )
        room = max(1, self._batch_tokens - len(answers))
        if prompts and prompts[0].prompt_tokens <= room:
            passes_max = 1
        elif prompts:
            passes_max = min(passes_max, prompts[0].prompt_tokens // room)
        passes = max(1, int(passes_max))
        row = (0.0 if prompts else 1.0, len(answers), sum(request.depth for request in answers))
        self._spend(passes * self.costs.answer_s(row))
        self._compute(prompts, passes * room, room)
        for request in answers:
            request.answer_tokens -= passes
            if request.answer_tokens <= 0:
                self.requests.remove(request)
                self.free.append(request.slot)
        for request in prompts:
            if not request.prompt_tokens:
                request.first_token_s = self.now_s

    def _compute(self, prompts: list[RunningRequest], tokens: int, batch_tokens: int) -> None:
        for request in prompts:
            part = min(tokens, request.prompt_tokens)
            if not part:
                return
            is_last = float(part == request.prompt_tokens)
            row = prompt_row(part, request.depth, batch_tokens, is_last)
            self._spend(self.costs.prompt_s(row))
            request.prompt_tokens -= part
            request.depth += part
            tokens -= part

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds / self._weight


def first_token(work: ModelWork, costs: EngineCosts) -> tuple[str, float, float] | None:
    """Simulate engines until the estimated request has its first token; None: none has a slot.

    Returns the instance, and the seconds until the request has its slot and its first token, the
    time of a load included.
    """
    engines = [
        SimulatedEngine(engine, costs, work.ready_in_s)
        for engine in work.engines
        if engine.free_slots or engine.running
    ]
    if not engines:
        return None
    waiting = list(work.waiting)
    estimated = work.waiting[work.place]
    taken: tuple[SimulatedEngine, RunningRequest, float] | None = None  # with the time of its slot
    while True:
        if taken and (first_token_s := taken[1].first_token_s) is not None:
            return taken[0].name, taken[2], first_token_s
        if found := _next_assignment(engines, waiting):
            engine, waiting_request = found[0], waiting.pop(found[1])
            request = _take(engine, waiting_request)
            if waiting_request is estimated:
                taken = engine, request, engine.now_s
        elif taken:
            taken[0].step()
        else:
            busy = (engine for engine in engines if engine.requests)
            min(busy, key=lambda engine: engine.now_s).step()


def _next_assignment(
    engines: Sequence[SimulatedEngine], waiting: Sequence[WaitingRequest]
) -> tuple[SimulatedEngine, int] | None:
    """Return an engine with a free slot, and the place of the first request that takes it."""
    free = [engine for engine in engines if engine.free]
    for place, request in enumerate(waiting if free else ()):
        may = [engine for engine in free if request.instance in {None, engine.name}]
        if may:
            return min(may, key=lambda engine: (engine.now_s, request.new_on(engine.name))), place
    return None


def _take(engine: SimulatedEngine, waiting: WaitingRequest) -> RunningRequest:
    new_tokens = waiting.new_on(engine.name)
    cached = waiting.prompt_tokens - new_tokens
    slot = waiting.slots.get(engine.name)
    engine.now_s += 0.0 if engine.requests else engine.costs.overhead_s
    return engine.take(new_tokens, cached, waiting.answer_tokens, slot)
