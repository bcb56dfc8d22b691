"""How likely a conversation returns that has ended a turn: of those before it. Pure.

Each conversation counts as soon as it returns, and as one that does not by the time since it ended
its turn: half after the usual time from a turn to the next, all in the end. So what lately ended
makes no conversation unlikely, and where each has one turn that is known after a few of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from proxy.upstream.timings import average

# Before the first: half of them, after half a minute.
_PRIOR: Final = 0.5
_PRIOR_SAMPLES: Final = 2.0
_RETURN_S: Final = 30.0
# Programs return at once, and the people before them later.
_RETURN_MIN_S: Final = 5.0
# An old return counts for less: the latest sixty or so count.
_KEPT: Final = 0.984
# A conversation may still return after any time.
_LEAST: Final = 0.02
# Conversations of fewer turns than this are told apart.
_TURNS_MAX: Final = 4
_WAITING_MAX: Final = 512
# What the waiting ones say is counted once in so long.
_COUNTED_S: Final = 0.25


@dataclass(slots=True)
class _Waiting:
    """A conversation after its last turn."""

    turns: int
    tokens: int
    ended_at_s: float


@dataclass(slots=True)
class _Tally:
    returned: float = 0.0
    gone: float = 0.0

    def add(self, *, returned: float = 0.0, gone: float = 0.0) -> None:
        self.returned = _KEPT * self.returned + returned
        self.gone = _KEPT * self.gone + gone


class ReturnRates:
    """Of one model. Conversations are told apart by numbers; remembers at most 512 of them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._tallies = [_Tally() for _ in range(_TURNS_MAX)]
        self._log_return_s = math.log(_RETURN_S)
        self._shares: list[float] = []
        self._counted_at_s = -math.inf

    @property
    def return_s(self) -> float:
        """The usual time from the end of a turn to the next one."""
        return math.exp(self._log_return_s)

    def note_turn(
        self, conversation: int, began_at_s: float, ended_at_s: float, tokens: int
    ) -> int | None:
        """Note that a turn has ended, with the tokens that the conversation has now.

        Returns those that it had after the turn before; None where that is not known.
        """
        before = self._waiting.pop(conversation, None)
        if before:
            pause_s = max(_RETURN_MIN_S, began_at_s - before.ended_at_s)
            self._log_return_s = average(self._log_return_s, math.log(pause_s))
            self._tallies[_group(before.turns)].add(returned=1.0)
        turns = before.turns + 1 if before else 1
        self._waiting[conversation] = _Waiting(turns, tokens, ended_at_s)
        if len(self._waiting) > _WAITING_MAX:
            _, oldest = self._waiting.popitem(last=False)
            self._tallies[_group(oldest.turns)].add(gone=1.0)
        return before.tokens if before else None

    def return_p(self, conversation: int, now_s: float) -> float:
        """Return the chance that a conversation returns after the turn that it ended last."""
        if now_s - self._counted_at_s >= _COUNTED_S or not self._shares:
            self._count(now_s)
        waiting = self._waiting.get(conversation)
        if waiting is None:
            return max(_LEAST, self._shares[0])
        share = self._shares[_group(waiting.turns)]
        late = 1 - self._elapsed(waiting, now_s)
        return max(_LEAST, share * late / (1 - share * (1 - late)))

    def _elapsed(self, waiting: _Waiting, now_s: float) -> float:
        """Return which share of those that return would have done so by now.

        A log-logistic distribution: some return ten times later than is usual.
        """
        since_s = max(0.0, now_s - waiting.ended_at_s)
        return since_s / (since_s + self.return_s)

    def _count(self, now_s: float) -> None:
        gone = [one.gone for one in self._tallies]
        for one in self._waiting.values():
            gone[_group(one.turns)] += self._elapsed(one, now_s)
        returned = [one.returned for one in self._tallies]
        prior = _share(sum(returned), sum(gone), _PRIOR)
        self._shares = [_share(*both, prior) for both in zip(returned, gone, strict=True)]
        self._counted_at_s = now_s


def _group(turns: int) -> int:
    return min(turns, _TURNS_MAX) - 1


def _share(returned: float, gone: float, prior: float) -> float:
    return (returned + _PRIOR_SAMPLES * prior) / (returned + gone + _PRIOR_SAMPLES)
