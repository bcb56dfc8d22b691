"""Compares both sides of a trial moment by moment. Pure.

What else runs on a machine changes for seconds at a time, and may slow down one engine alone. So
requests of one moment resemble each other, whichever conversations they belong to: of two equal
engines on a busy machine one was 1.2 (1.1 to 1.4) times slower by its conversations. Here each of
20 blocks of time is one observation: the ratio of both sides in it, under equal load.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from supervisor.bench.comparison import Comparison, Words, compare
from supervisor.trial.equal_load import Value, under_equal_load

# A value with its time, monotonic, and how many other requests its engine had.
Timed = tuple[float, float, int]
_Blocks = Mapping[int, Sequence[Sequence[Value]]]

_BLOCKS: Final = 20
_BLOCK_MIN_S: Final = 5.0
_PAIRS_MIN: Final = 5


def compare_over_time(base: Sequence[Timed], other: Sequence[Timed], *, words: Words) -> Comparison:
    """Compare two sides; an interval needs five blocks with requests of both."""
    pairs = list(_pairs(base, other))
    enough = pairs if len(pairs) >= _PAIRS_MIN else pairs[:1]
    return compare([own for own, _ in enough], [tried for _, tried in enough], words=words)


def _pairs(base: Sequence[Timed], other: Sequence[Timed]) -> Iterator[tuple[float, float]]:
    times = [at_s for at_s, _, _ in (*base, *other)]
    if not times:
        return
    begin_s = min(times)
    length_s = max(_BLOCK_MIN_S, (max(times) - begin_s) / _BLOCKS)
    sides = [_in_blocks(side, begin_s, length_s) for side in (base, other)]
    for block in sorted(sides[0].keys() & sides[1].keys()):
        own, tried = under_equal_load(sides[0][block], sides[1][block])
        if own and tried:
            yield _median(own), _median(tried)


def _in_blocks(side: Sequence[Timed], begin_s: float, length_s: float) -> _Blocks:
    blocks: dict[int, list[list[Value]]] = defaultdict(list)
    for at_s, value, others in side:
        if value > 0:
            blocks[min(_BLOCKS - 1, int((at_s - begin_s) / length_s))].append([(value, others)])
    return blocks


def _median(values: Sequence[Sequence[float]]) -> float:
    """Return the median: a process that waits once for the processor is no slow engine."""
    return statistics.median(value for one in values for value in one)
