"""Simulate how many model loads are needed when requests are grouped by model.

Inputs are the requests of each client, the duration of each answer and load, and the longest wait.
Loaded models serve their requests. A waiting model is loaded when no client can be served
otherwise, when a loaded model was idle for as long as its own load took, or when a request reached
the longest wait; all requests that wait for it share the load. It replaces the model that was idle
longest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# A model, and the seconds that it takes to answer, without queueing.
TimedRequest = tuple[str, float]


@dataclass(frozen=True)
class Memory:
    """Capacity for models.

    Attributes:
        models_max: Models loaded at once.
        load_s: Seconds to load each model.
        slots: Concurrent answers per model.
    """

    models_max: int
    load_s: Mapping[str, float]
    slots: int


def count(lists: Sequence[Sequence[TimedRequest]], memory: Memory, wait_max_s: float) -> int:
    """Return the number of loads, starting with nothing loaded.

    Args:
        lists: The requests of each client, sent one after another.
        wait_max_s: Longest wait before a model is loaded regardless of other requests.
    """
    simulation = _Simulation([list(requests) for requests in lists], memory)
    while simulation.sending or simulation.waiting:
        simulation.step(wait_max_s)
    return simulation.loads


@dataclass
class _Simulation:
    """The state of the simulation.

    Attributes:
        left: Requests that each client has yet to send.
        sending: Heap of (time of the next request, client).
        waiting: (Since when, client), in order, for a model that is not loaded.
        slots_s: Loaded models; for each a heap of the times at which its slots become free.
        done_s: When each model completes its last request.
    """

    left: list[list[TimedRequest]]
    memory: Memory
    sending: list[tuple[float, int]] = field(init=False)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    slots_s: dict[str, list[float]] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)
    loads: int = 0

    def __post_init__(self) -> None:
        self.sending = [(0.0, client) for client, requests in enumerate(self.left) if requests]

    def step(self, wait_max_s: float) -> None:
        """Send the next request, or load the model that was requested first."""
        swap_at_s = self._swap_at_s(wait_max_s) if self.waiting else math.inf
        if self.sending and self.sending[0][0] <= swap_at_s:
            self._send(*heapq.heappop(self.sending))
        else:
            self._swap(swap_at_s)

    def _send(self, now_s: float, client: int) -> None:
        model, _ = self.left[client][0]
        if model not in self.slots_s and len(self.slots_s) < self.memory.models_max:
            self._load(model, now_s)
        if model in self.slots_s:
            self._answer(client, now_s)
        else:
            self.waiting.append((now_s, client))

    def _swap_at_s(self, wait_max_s: float) -> float:
        """Return when the next model is loaded unless a request comes first."""
        since_s = self.waiting[0][0]
        done_s = {name: self.done_s[name] for name in self.slots_s}
        idle_s = min(at_s + self.memory.load_s[name] for name, at_s in done_s.items())
        return max(since_s, min(since_s + wait_max_s, idle_s, max(done_s.values())))

    def _swap(self, now_s: float) -> None:
        model, _ = self.left[self.waiting[0][1]][0]
        idle = [name for name in self.slots_s if self.done_s[name] <= now_s]
        leaving = min(idle or self.slots_s, key=lambda name: (self.done_s[name], name))
        del self.slots_s[leaving]
        self._load(model, max(now_s, self.done_s[leaving]))
        sharing = [waiter for waiter in self.waiting if self.left[waiter[1]][0][0] == model]
        self.waiting = [waiter for waiter in self.waiting if waiter not in sharing]
        for _, client in sharing:
            self._answer(client, now_s)

    def _load(self, model: str, now_s: float) -> None:
        self.done_s[model] = ready_s = now_s + self.memory.load_s[model]
        self.slots_s[model] = [ready_s] * self.memory.slots
        self.loads += 1

    def _answer(self, client: int, now_s: float) -> None:
        model, answer_s = self.left[client].pop(0)
        slots_s = self.slots_s[model]
        done_s = max(now_s, slots_s[0]) + answer_s
        heapq.heapreplace(slots_s, done_s)
        self.done_s[model] = max(self.done_s[model], done_s)
        if self.left[client]:
            heapq.heappush(self.sending, (done_s, client))
