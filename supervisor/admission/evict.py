"""Who must leave so that another model fits. Pure.

    FITS    there is room now
    EVICT   there will be, once these have left
    WAIT    there will be, once somebody who works, or came just now, may leave too
    NEVER   not even alone on the machine

Who works, is pinned, or has not been up for `min_residency_s` is never sent away. Of the others the
least valuable go first: who has been idle longest, weighed by what it costs to have it back as it
was: to load it and to read its cache anew. None leaves who need not: those that turn out not to be
needed once all are named are let off again, the most valuable first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# Bytes by the memory they are in: "host", or a device's name.
Bytes = Mapping[str, int]

# What it costs to read a token of a conversation again: SmolLM2-135M reads 165 a second on one
# core. Only the order of candidates follows from it.
_SECONDS_PER_TOKEN: Final = 0.006


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """An instance that holds memory.

    Attributes:
        name: The instance's name.
        model: Its model.
        is_pinned: Whether its settings forbid to send it away.
        is_idle: Whether nobody has or awaits an answer of it.
        idle_s: Seconds since its last request ended; 0 while it works.
        resident_s: Seconds it has been up.
        reload_cost_s: Seconds it takes to load.
        cached_tokens: Tokens of conversations in its slots that would have to be read anew.
        frees: What is free once it has left.
    """

    name: str
    model: str
    is_pinned: bool
    is_idle: bool
    idle_s: float
    resident_s: float
    reload_cost_s: float
    cached_tokens: int
    frees: Bytes

    @property
    def return_cost_s(self) -> float:
        """Return what it costs to have it back as it was."""
        return self.reload_cost_s + self.cached_tokens * _SECONDS_PER_TOKEN


class EvictionVerdict(Enum):
    """What is to be done for a model that wants in."""

    FITS = auto()
    EVICT = auto()
    WAIT = auto()
    NEVER = auto()


@dataclass(frozen=True, slots=True)
class EvictionDecision:
    """What is to be done, and for whom it would be.

    Attributes:
        verdict: Which of the four.
        names: Instances that leave, first the first; for EVICT only.
        short: What lacks in each memory where something does: now for EVICT and WAIT, on an empty
            machine for NEVER.
    """

    verdict: EvictionVerdict
    names: tuple[str, ...] = ()
    short: tuple[tuple[str, int], ...] = ()


def decide(
    need: Bytes,
    free: Bytes,
    candidates: Sequence[EvictionCandidate],
    *,
    room: Bytes,
    min_residency_s: float,
) -> EvictionDecision:
    """Return what is to be done for an instance that wants to start.

    Args:
        need: What it takes of each memory.
        free: What models may still take of each memory, the reserve left out.
        candidates: All instances that are up.
        room: What models may take of each memory when none is up.
        min_residency_s: An instance that has been up for less is left alone.
    """
    if never := _short(need, room):
        return EvictionDecision(EvictionVerdict.NEVER, short=never)
    short = _short(need, free)
    if not short:
        return EvictionDecision(EvictionVerdict.FITS)
    movable = [one for one in candidates if _may_evict(one, min_residency_s)]
    leaving = _enough(need, free, sorted(movable, key=value))
    if leaving is None:
        return EvictionDecision(EvictionVerdict.WAIT, short=short)
    return EvictionDecision(EvictionVerdict.EVICT, tuple(one.name for one in leaving), short)


def value(candidate: EvictionCandidate) -> tuple[float, str]:
    """Return what orders candidates, the least valuable first.

    An hour of idleness is worth an hour of coming back; of two alike the name decides.
    """
    return candidate.return_cost_s / (1 + candidate.idle_s), candidate.name


def _may_evict(candidate: EvictionCandidate, min_residency_s: float) -> bool:
    return candidate.is_idle and not candidate.is_pinned and candidate.resident_s >= min_residency_s


def _enough(
    need: Bytes, free: Bytes, ordered: Sequence[EvictionCandidate]
) -> list[EvictionCandidate] | None:
    """Return the first candidates that free enough and no one too many, or None when all do not."""
    leaving: list[EvictionCandidate] = []
    for candidate in ordered:
        if not _short(need, _with(free, leaving)):
            break
        leaving.append(candidate)
    if _short(need, _with(free, leaving)):
        return None
    for spared in reversed(ordered[: len(leaving)]):
        others = [one for one in leaving if one is not spared]
        if not _short(need, _with(free, others)):
            leaving = others
    return leaving


def _with(free: Bytes, leaving: Iterable[EvictionCandidate]) -> Bytes:
    """Return what is free once these have left."""
    total = Counter(dict(free))
    for one in leaving:
        total.update(one.frees)
    return total


def _short(need: Bytes, free: Bytes) -> tuple[tuple[str, int], ...]:
    """Return what lacks in each memory where something does."""
    return tuple(
        (name, lacking)
        for name, wanted in need.items()
        if (lacking := wanted - max(0, free.get(name, 0))) > 0
    )
