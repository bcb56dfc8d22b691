"""Chooses which models to unload so that another one fits in memory. Pure.

The least valuable go first: those idle longest, weighed by the cost of having them back as they
were, which is loading them and computing their cached prompts again. A model that turns out not to
be needed once all are chosen stays, the most valuable first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# Bytes by memory: "host", or a device's name.
Bytes = Mapping[str, int]

# SmolLM2-135M computes 165 tokens of a prompt a second on one core. Only the order of candidates
# follows from it.
_SECONDS_PER_TOKEN: Final = 0.006


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A model that may be unloaded; `frees` is what it takes of each memory."""

    name: str
    idle_s: float
    reload_cost_s: float
    cached_tokens: int
    frees: Bytes

    @property
    def value(self) -> tuple[float, str]:
        """Sort key, the least valuable first; of two alike the name decides.

        An hour idle weighs as much as an hour of reloading.
        """
        return_cost_s = self.reload_cost_s + self.cached_tokens * _SECONDS_PER_TOKEN
        return return_cost_s / (1 + self.idle_s), self.name


def fits(required: Bytes, free: Bytes) -> bool:
    """Return whether every memory has enough free; one that is not listed has none."""
    return all(size <= max(0, free.get(name, 0)) for name, size in required.items())


def choose_victims(
    required: Bytes, free: Bytes, candidates: Iterable[EvictionCandidate]
) -> tuple[str, ...] | None:
    """Return the models to unload, the first first; None where unloading all is not enough."""
    chosen: list[EvictionCandidate] = []
    for candidate in sorted(candidates, key=lambda one: one.value):
        if fits(required, _free_after(free, chosen)):
            break
        chosen.append(candidate)
    if not fits(required, _free_after(free, chosen)):
        return None
    for spared in reversed(tuple(chosen)):
        others = [one for one in chosen if one is not spared]
        if fits(required, _free_after(free, others)):
            chosen = others
    return tuple(one.name for one in chosen)


def _free_after(free: Bytes, unloaded: Sequence[EvictionCandidate]) -> Bytes:
    total = Counter(dict(free))
    for one in unloaded:
        total.update(one.frees)
    return total
