"""What is believed of the instances' caches: who holds which prompts, who is home to whom.

Beliefs are hints. They are noted when a request is given to an instance, weighed by what answers
say of its cache, and forgotten when its process is another than before. An instance that
was withdrawn and comes back as the same process still has its cache. All of it is bounded: what
was used least recently goes first, of a prompt its end before its beginning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from proxy.engine.upstream import Upstream
from proxy.home.berths import Berths
from proxy.home.prefix import BLOCK_TOKENS, Prompt
from proxy.line.rates import average

# A conversation is known by the ends of its last turns, and by its own name if it has one.
_MARKS_EACH: Final = 6
# Each conversation has some marks and dozens of blocks.
_BLOCKS_PER_MARK: Final = 8
# Only the latest conversations of a model count as an instance's homes: those long over fill no
# slot, and an instance that starts anew must not be given everything until it has as many.
_LATEST_MAX: Final = 128


@dataclass(slots=True)
class CacheTotals:
    """Tokens of prompts that an instance's cache held, over its answers.

    Attributes:
        predicted: What was believed when the requests were given to it.
        actual: What its answers said.
    """

    predicted: int = 0
    actual: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """One process of an instance, told from the next by its number.

    Attributes:
        berths: Its slots.
        trust: The share of what was believed of its cache that proved true, lately; 0 to 1.
    """

    identity: tuple[object, ...]
    number: int
    berths: Berths
    trust: float = 1.0


@dataclass(slots=True, eq=False)
class _Talk:
    """One conversation, and its home."""

    model: str
    home: str
    run: int
    marks: deque[int] = field(default_factory=deque)


class Affinity:
    """The beliefs of one proxy over all its instances.

    Args:
        index_max: Blocks of prompts that are remembered at most, at least 1.
    """

    def __init__(self, index_max: int) -> None:
        self._blocks: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._talks: OrderedDict[int, _Talk] = OrderedDict()
        self._blocks_max = index_max
        self._talks_max = max(1, index_max // _BLOCKS_PER_MARK)
        self._latest: dict[str, OrderedDict[_Talk, None]] = {}
        self._runs: dict[str, _Run] = {}
        self._numbers = count(1)
        self._totals: dict[str, CacheTotals] = {}

    def __len__(self) -> int:
        return len(self._blocks) + len(self._talks)

    def meet(self, upstream: Upstream) -> None:
        """Note that an instance is admitted: as a new process it holds nothing yet."""
        # A supervisor gives each run a key of its own.
        identity = (upstream.api_key, upstream.socket, upstream.host, upstream.port)
        known = self._runs.get(upstream.name)
        if known is None or known.identity != identity:
            self._runs[upstream.name] = _Run(identity, next(self._numbers), Berths(upstream.slots))

    def berths(self, name: str) -> Berths:
        """Return the slots of an instance that was met."""
        return self._runs[name].berths

    # Questions.

    def cached_tokens(self, name: str, prompt: Prompt | None) -> int:
        """Return how many tokens of a prompt an instance is believed to hold; 0 if unknown."""
        if prompt is None or (run := self._runs.get(name)) is None:
            return 0
        held = min(self._held(run, prompt) * BLOCK_TOKENS, prompt.tokens)
        return round(held * run.trust)

    def home(self, prompt: Prompt | None, session: int | None) -> str | None:
        """Return the instance that has a conversation: by its history, else by its name."""
        talk = self._find(prompt, session)
        return talk.home if talk else None

    def homes(self, model: str) -> Mapping[str, int]:
        """Return to how many of the latest conversations of a model each instance is home."""
        counts: dict[str, int] = {}
        for talk in self._latest.get(model, ()):
            if self._is_alive(talk):
                counts[talk.home] = counts.get(talk.home, 0) + 1
        return counts

    def totals(self) -> Mapping[str, CacheTotals]:
        """Return predicted and actual cached tokens of every instance there ever was."""
        return dict(self._totals)

    # What happens.

    def settle(self, upstream: Upstream, prompt: Prompt, session: int | None) -> object:
        """Note that a prompt was given to an instance, which is its conversation's home now.

        Returns:
            The conversation: the same object for each of its turns.
        """
        run = self._runs[upstream.name]
        talk = self._find(prompt, session) or _Talk(upstream.model, upstream.name, run.number)
        talk.home, talk.run = upstream.name, run.number
        self._mark(talk, prompt.marks[-1])
        if session is not None:
            self._mark(talk, session)
        latest = self._latest.setdefault(upstream.model, OrderedDict())
        latest[talk] = None
        latest.move_to_end(talk)
        if len(latest) > _LATEST_MAX:
            latest.popitem(last=False)
        self.holds(upstream.name, prompt)
        return talk

    def answered(self, prompt: Prompt, mark: int) -> None:
        """Note the mark of a prompt with its answer, by which the next turn will be known."""
        if talk := self._talks.get(prompt.marks[-1]):
            self._mark(talk, mark)

    def correct(self, name: str, predicted: int, actual: int) -> None:
        """Note how many tokens of a prompt an instance's cache really held, when it was asked.

        What the instance has computed since, it holds all the same. But if it keeps falling short,
        it has little room or does not cache at all, and less is expected of it from then on.
        """
        totals = self._totals.setdefault(name, CacheTotals())
        totals.predicted += predicted
        totals.actual += actual
        if run := self._runs.get(name):
            # With nothing predicted, there is nothing to doubt.
            run.trust = average(run.trust, min(1.0, actual / predicted) if predicted else 1.0)

    def holds(self, name: str, prompt: Prompt) -> None:
        """Note that an instance holds a prompt, be it computed or restored; unknown ones do not."""
        if (run := self._runs.get(name)) is None:
            return
        alone = (run.number,)  # shared: most blocks have one holder
        # The end first, so that it is also the first to be forgotten.
        for block in reversed(prompt.blocks):
            holders = self._blocks.get(block, ())
            if run.number not in holders:
                self._blocks[block] = self._alive(holders) + alone if holders else alone
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)

    def _held(self, run: _Run, prompt: Prompt) -> int:
        blocks, holders, number = prompt.blocks, self._blocks, run.number
        # Who holds a block holds all before it, so the first that is missing is searched for.
        return bisect_left(
            range(len(blocks)), 1, key=lambda at: number not in holders.get(blocks[at], ())
        )

    def _alive(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        numbers = {run.number for run in self._runs.values()}
        return tuple(one for one in holders if one in numbers)

    def _find(self, prompt: Prompt | None, session: int | None) -> _Talk | None:
        marks = (*(reversed(prompt.marks) if prompt else ()), session)
        found = (self._talks.get(mark) for mark in marks if mark is not None)
        return next((talk for talk in found if talk and self._is_alive(talk)), None)

    def _is_alive(self, talk: _Talk) -> bool:
        run = self._runs.get(talk.home)
        return run is not None and run.number == talk.run

    def _mark(self, talk: _Talk, mark: int) -> None:
        if self._talks.get(mark) is not talk:
            talk.marks.append(mark)
            self._talks[mark] = talk
        self._talks.move_to_end(mark)
        if len(talk.marks) > _MARKS_EACH:
            self._unmark(talk, talk.marks.popleft())
        while len(self._talks) > self._talks_max:
            self._talks.popitem(last=False)

    def _unmark(self, talk: _Talk, mark: int) -> None:
        if self._talks.get(mark) is talk:
            del self._talks[mark]
