"""Figures of simulation runs."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Final

from support.virtual_time import run_in_virtual_time

from scripts.simulation.run import Case, Run

# A request is good if its first token comes within this time.
GOOD_S: Final = 2.0


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
    return {
        "requests": facts.requests,
        "lost": facts.requests - facts.answered - facts.failed,
        "failed": facts.failed,
        "prefilled": facts.prefilled,
        "of ideal": facts.prefilled / max(1, facts.ideal),
        "nodes": fairness(list(facts.work.values()), run.case.nodes),
        "clients": fairness([statistics.fmean(entry) for entry in facts.slowdown.values()]),
        "waited": sum(wait > 0 for wait in facts.waits_s) / max(1, len(facts.waits_s)),
        "wait p99": percentile(facts.waits_s, 0.99),
        "repeated": facts.repeated,
        "retried": facts.retried,
        "cut": facts.cut,
        "found": facts.found / max(1, facts.returned),
        "digest reads per s": run.digest_costs.reads / facts.virtual_s,
        "digest bytes": run.digest_costs.read_bytes / facts.requests,
        **_stages(run),
    }


def _stages(run: Run) -> dict[str, float]:
    """Return the first tokens of each stage of a benchmark, and of all but the first."""
    by_rate, seconds = run.facts.first_tokens_s, run.facts.stages_s
    found: dict[str, float] = {}
    stages: dict[str, tuple[Sequence[float], float]] = {
        f"{rate}": (by_rate[rate], seconds[rate]) for rate in seconds if rate
    }
    counted = [rate for rate in by_rate if rate] or list(by_rate)
    total_s = sum(seconds.get(rate, run.facts.virtual_s) for rate in counted)
    stages["all"] = [wait_s for rate in counted for wait_s in by_rate[rate]], total_s
    for name, (waits_s, took_s) in stages.items():
        found[f"first token {name}"] = statistics.fmean(waits_s)
        found[f"first token p90 {name}"] = percentile(waits_s, 0.9)
        found[f"answers per s {name}"] = len(waits_s) / took_s
        found[f"good per s {name}"] = sum(wait_s <= GOOD_S for wait_s in waits_s) / took_s
    return found


def _costs(run: Run) -> dict[str, float]:
    index, requests = run.fronts[0].cache, run.facts.requests
    decisions = run.times.decisions
    digests_ns = sum(run.times.digests) + run.digest_costs.written_ns
    return {
        "decision p50": percentile(decisions, 0.5) / 1000,
        "decision p99": percentile(decisions, 0.99) / 1000,
        "request": (sum(decisions) + sum(run.times.ends)) / 1000 / requests,
        "digests": digests_ns / 1000 / requests,
        "index": len(index),
        "index MB": size_bytes(index) / 1e6,
        "reports MB": size_bytes(index.remote) / 1e6,
    }


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


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
