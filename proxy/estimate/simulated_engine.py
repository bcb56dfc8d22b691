"""An engine that computes its requests in passes, in virtual time.

Each pass has one token of each answer, then tokens of prompts, slot by slot in the order of their
numbers, until the batch is full. So the prompt of a low slot goes before that of a high one.

Source: llama-server, build 10434, `update_slots` of tools/server/server-context.cpp.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from proxy.estimate.costs import EngineCosts, prompt_row
from proxy.estimate.work import EngineWork

_HALF: Final = 0.5


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in a slot; `first_token_s` is set once its prompt is computed."""

    slot: int
    prompt_tokens: int
    depth: int
    answer_tokens: float
    first_token_s: float | None = None


class SimulatedEngine:
    """Args: `begins_s`: when it computes its first pass.

    Attributes:
        now_s: The end of its latest pass, from the moment of the estimate.
    """

    def __init__(self, work: EngineWork, costs: EngineCosts, begins_s: float) -> None:
        self.name = work.name
        self.now_s = begins_s
        self._batch_tokens = work.batch_tokens
        self.costs = costs
        self._weight = work.weight
        self._free = deque(work.free_slots)
        self._requests = [
            SimulatedRequest(one.slot, one.prompt_tokens, one.depth, one.answer_tokens)
            for one in work.running
        ]
        if self._requests:  # the pass under way has taken half of its time
            before_s = self.now_s
            self.step(passes_max=1)
            self.now_s -= _HALF * (self.now_s - before_s)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def take(
        self, prompt_tokens: int, depth: int, answer_tokens: float, slot: int | None
    ) -> SimulatedRequest:
        """Give a request a free slot: that one, if it is free."""
        given = self._free[0] if slot is None or slot not in self._free else slot
        self._free.remove(given)
        taken = SimulatedRequest(given, prompt_tokens, depth, answer_tokens)
        self._requests.append(taken)
        return taken

    def step(self, passes_max: float = math.inf) -> None:
        """Compute passes until something changes."""
        answers = [one for one in self._requests if not one.prompt_tokens]
        prompts = sorted((one for one in self._requests if one.prompt_tokens), key=_slot)
        if answers:
            passes_max = min(passes_max, math.ceil(min(one.answer_tokens for one in answers)))
        room = max(1, self._batch_tokens - len(answers))
        if prompts and prompts[0].prompt_tokens <= room:
            passes_max = 1
        elif prompts:
            passes_max = min(passes_max, prompts[0].prompt_tokens // room)
        passes = max(1, int(passes_max))
        row = (0.0 if prompts else 1.0, len(answers), sum(one.depth for one in answers))
        self._spend(passes * self.costs.answer_s(row))
        self._compute(prompts, passes * room, room)
        for one in answers:
            one.answer_tokens -= passes
        self._free_slots()
        for one in prompts:
            if not one.prompt_tokens:
                one.first_token_s = self.now_s

    def _compute(self, prompts: list[SimulatedRequest], tokens: int, batch_tokens: int) -> None:
        for one in prompts:
            part = min(tokens, one.prompt_tokens)
            if not part:
                return
            is_last = float(part == one.prompt_tokens)
            row = prompt_row(part, one.depth, batch_tokens, is_last)
            self._spend(self.costs.prompt_s(row))
            one.prompt_tokens -= part
            one.depth += part
            tokens -= part

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds / self._weight

    def _free_slots(self) -> None:
        for one in [one for one in self._requests if one.answer_tokens <= 0]:
            self._requests.remove(one)
            self._free.append(one.slot)


def _slot(request: SimulatedRequest) -> int:
    return request.slot
