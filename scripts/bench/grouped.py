"""How many loads a grouped order needs, computed in a time of its own.

It is given what each client will ask, how long answers and loads take, and how long a request may
wait. Models in memory answer whoever asks them. Another one comes when nobody has anything else to
ask, when one in memory was without questions for as long as its load took, or when a request has
waited as long as it may; whoever asks for it meanwhile shares that load. In its place leaves the
model that was asked longest ago.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Who is asked, and how many seconds the answer takes once its turn has come.
Asked = tuple[str, float]


@dataclass(frozen=True)
class Memory:
    """What holds models.

    Attributes:
        places: How many are in it at once.
        load_s: Seconds that each takes to come into it.
        slots: Answers at a time, of each model.
    """

    places: int
    load_s: Mapping[str, float]
    slots: int


def count(lists: Sequence[Sequence[Asked]], memory: Memory, wait_max_s: float) -> int:
    """Return the loads that a grouped order needs, from an empty memory on.

    Args:
        lists: What each client asks, in order; one question at a time.
        memory: What holds the models.
        wait_max_s: How long a request waits before its model comes whoever is asked meanwhile.
    """
    order = _Order([list(asked) for asked in lists], memory)
    while order.asking or order.waiting:
        order.go_on(wait_max_s)
    return order.loads


@dataclass
class _Order:
    """One run.

    Attributes:
        left: What each client has yet to ask.
        memory: What holds the models.
        asking: When each client that does not wait asks next; a heap.
        waiting: Since when clients wait for a model to come, the first first.
        slots_s: Models in memory, and when each of their slots is free; a heap.
        done_s: When each model has answered what it was asked.
        loads: How many there were.
    """

    left: list[list[Asked]]
    memory: Memory
    asking: list[tuple[float, int]] = field(init=False)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    slots_s: dict[str, list[float]] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)
    loads: int = 0

    def __post_init__(self) -> None:
        self.asking = [(0.0, client) for client, asked in enumerate(self.left) if asked]

    def go_on(self, wait_max_s: float) -> None:
        """Take the next question, or bring in the model that is waited for longest."""
        swap_at_s = self._swap_at_s(wait_max_s) if self.waiting else math.inf
        if self.asking and self.asking[0][0] <= swap_at_s:
            self._ask(*heapq.heappop(self.asking))
        else:
            self._swap(swap_at_s)

    def _ask(self, now_s: float, client: int) -> None:
        model, _ = self.left[client][0]
        if model not in self.slots_s and len(self.slots_s) < self.memory.places:
            self._bring(model, now_s)
        if model in self.slots_s:
            self._answer(client, now_s)
        else:
            self.waiting.append((now_s, client))

    def _swap_at_s(self, wait_max_s: float) -> float:
        """Return when the next model comes, if nobody asks before."""
        since_s = self.waiting[0][0]
        done_s = {name: self.done_s[name] for name in self.slots_s}
        rested_s = min(at_s + self.memory.load_s[name] for name, at_s in done_s.items())
        return max(since_s, min(since_s + wait_max_s, rested_s, max(done_s.values())))

    def _swap(self, now_s: float) -> None:
        model, _ = self.left[self.waiting[0][1]][0]
        idle = [name for name in self.slots_s if self.done_s[name] <= now_s]
        leaving = min(idle or self.slots_s, key=lambda name: (self.done_s[name], name))
        del self.slots_s[leaving]
        self._bring(model, max(now_s, self.done_s[leaving]))
        sharing = [one for one in self.waiting if self.left[one[1]][0][0] == model]
        self.waiting = [one for one in self.waiting if one not in sharing]
        for _, client in sharing:
            self._answer(client, now_s)

    def _bring(self, model: str, now_s: float) -> None:
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
            heapq.heappush(self.asking, (done_s, client))
