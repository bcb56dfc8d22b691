"""How many loads a grouped order needs, computed in a time of its own.

It is given what each client will ask, how long answers and loads take, and how long a request may
wait. Models in memory answer as long as anybody asks them; another comes only when nobody has
anything else to ask, or when a request for it has waited as long as it may. Whoever asks for it
meanwhile shares that load. In its place leaves the model that clients ask for again the latest,
which no steward knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """What was measured of each model, in seconds.

    Attributes:
        answer_s: How long an answer takes once its turn has come.
        load_s: How long it takes to come into memory.
    """

    answer_s: Mapping[str, float]
    load_s: Mapping[str, float]


def count(lists: Sequence[Sequence[str]], costs: Costs, *, places: int, wait_max_s: float) -> int:
    """Return the loads that a grouped order needs, from an empty memory on.

    Args:
        lists: The models that each client asks, in order; one question at a time.
        costs: How long things take.
        places: How many models are in memory at once.
        wait_max_s: How long a request waits before its model comes whoever is asked meanwhile.
    """
    order = _Order([list(models) for models in lists], costs, places)
    while order.asking or order.waiting:
        order.go_on(wait_max_s)
    return order.loads


@dataclass
class _Order:
    """One run.

    Attributes:
        left: What each client has yet to ask.
        costs: How long things take.
        places: How many models are in memory at once.
        asking: When each client that does not wait asks next; a heap.
        waiting: Since when clients wait for a model to come, the first first.
        ready_s: Models in memory, and from when on each answers.
        done_s: When each has answered what it was asked.
        loads: How many there were.
    """

    left: list[list[str]]
    costs: Costs
    places: int
    asking: list[tuple[float, int]] = field(init=False)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    ready_s: dict[str, float] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)
    loads: int = 0

    def __post_init__(self) -> None:
        self.asking = [(0.0, client) for client, models in enumerate(self.left) if models]

    def go_on(self, wait_max_s: float) -> None:
        """Take the next question, or bring in the model that is waited for longest."""
        if not self.asking:
            self._swap(self.waiting[-1][0])
        elif self.waiting and self.waiting[0][0] + wait_max_s < self.asking[0][0]:
            self._swap(self.waiting[0][0] + wait_max_s)
        else:
            self._ask(*heapq.heappop(self.asking))

    def _ask(self, now_s: float, client: int) -> None:
        model = self.left[client][0]
        if model not in self.ready_s and len(self.ready_s) < self.places:
            self._bring(model, now_s)
        if model in self.ready_s:
            self._answer(client, now_s)
        else:
            self.waiting.append((now_s, client))

    def _swap(self, now_s: float) -> None:
        model = self.left[self.waiting[0][1]][0]
        leaving = max(self.ready_s, key=lambda name: (self._questions_until(name), name))
        del self.ready_s[leaving]
        self._bring(model, max(now_s, self.done_s[leaving]))
        sharing = [one for one in self.waiting if self.left[one[1]][0] == model]
        self.waiting = [one for one in self.waiting if one not in sharing]
        for _, client in sharing:
            self._answer(client, now_s)

    def _bring(self, model: str, now_s: float) -> None:
        self.ready_s[model] = self.done_s[model] = now_s + self.costs.load_s[model]
        self.loads += 1

    def _answer(self, client: int, now_s: float) -> None:
        model = self.left[client].pop(0)
        done_s = max(now_s, self.ready_s[model]) + self.costs.answer_s[model]
        self.done_s[model] = max(self.done_s[model], done_s)
        if self.left[client]:
            heapq.heappush(self.asking, (done_s, client))

    def _questions_until(self, model: str) -> int:
        """Return how many questions clients have, all together, before each asks a model."""
        return sum(
            models.index(model) if model in models else len(models) for models in self.left
        )
