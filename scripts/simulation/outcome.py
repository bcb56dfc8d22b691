"""Results of simulation runs, as the rows of a table."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType

from support.virtual_time import run_in_virtual_time

from scripts.simulation.processor_time import percentile_us
from scripts.simulation.run import Case, Run


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run.

    Attributes:
        facts: The same for each run of a case.
        costs: Processor time and memory.
    """

    facts: dict[str, float]
    costs: dict[str, float]


def simulate(case: Case) -> Figures:
    gc.disable()  # the simulation's own objects would be most of its work
    run = Run(case)
    try:
        run_in_virtual_time(run.main())
    finally:
        gc.enable()
    return Figures(_facts(run), _costs(run))


def _facts(run: Run) -> dict[str, float]:
    facts = run.facts
    waits = sorted(facts.waits_s)
    return {
        "requests": facts.requests,
        "lost": facts.requests - facts.answered - facts.failed,
        "failed": facts.failed,
        "prefilled": facts.prefilled,
        "of ideal": facts.prefilled / facts.ideal,
        "nodes": fairness(list(facts.work.values()), run.case.nodes),
        "clients": fairness([statistics.fmean(entry) for entry in facts.slowdown.values()]),
        "waited": sum(wait > 0 for wait in waits) / len(waits),
        "wait p99": waits[int(0.99 * (len(waits) - 1))],
        "repeated": facts.repeated,
        "retried": facts.retried,
        "cut": facts.cut,
    }


def _costs(run: Run) -> dict[str, float]:
    index = run.router.cache
    decisions = run.times.decisions
    return {
        "decision p50": percentile_us(decisions, 0.5),
        "decision p99": percentile_us(decisions, 0.99),
        "request": (sum(decisions) + sum(run.times.ends)) / 1000 / run.facts.requests,
        "index": len(index),
        "index MB": size_bytes(index) / 1e6,
    }


def fairness(shares: Sequence[float], count: int | None = None) -> float:
    """Return Jain's index: 1 if all have the same, 1/n if one of n has all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / ((count or len(shares)) * squares) if squares else 1.0


def size_bytes(root: object) -> int:
    """Return the memory of an object with all that it refers to, but for code."""
    seen: set[int] = set()
    total, found = 0, [root]
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        found.extend(gc.get_referents(one))
    return total
