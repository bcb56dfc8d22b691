"""Simulate up to a thousand nodes behind the real router and prefix index, and print a table.

The engines only count, in virtual time, so all facts are the same for a seed on any machine; the
processor time of decisions is this machine's. Cases run beside each other, one for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from scripts.simulation.outcome import Figures, simulate
from scripts.simulation.run import Case

_NODES: Final = "1,3,10,30,100,300,1000"
_PER_NODE: Final = 100
_FEWEST: Final = 300
# Of the conversations, how many the two other runs of a number of nodes have.
_LEAST_BUSY_SHARE: Final = 3
_LOST_SHARE: Final = 5
_DECISION_US: Final = 100
_COLUMNS: Final = (
    "nodes",
    "conversations",
    "decision p50, p99, µs",
    "router per request, µs",
    "tokens, of ideal",
    "least busy",
    "fairness: nodes",
    "clients",
    "waited",
    "wait p99, s",
    "lost node: computed again",
    "retried, cut",
    "failed",
    "index, MB",
)

Found = Mapping[Case, Figures]


def main() -> int:
    """Return 1 if a request got no response or a decision took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", default=_NODES, help=f"numbers of nodes, default {_NODES}")
    parser.add_argument("--conversations", type=int, default=30_000, help="at most, of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="up to 100 nodes, 3000 conversations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    nodes = [int(part) for part in options.nodes.split(",")]
    if options.quick:
        nodes, options.conversations = [node for node in nodes if node <= 100], 3000
    rows = [cases(node, options.conversations, options.seed) for node in nodes]
    found = run_all([case for row in rows for case in row])
    print_table([row_of(row, found) for row in rows])
    if options.json:
        options.json.write_text(
            json.dumps([_members(entry, found[entry]) for entry in found], indent=1)
        )
    problems = [problem for row in rows for problem in problems_of(row, found)]
    for problem in problems:
        print(f"missed: {problem}")
    return 1 if problems else 0


def cases(nodes: int, conversations_max: int, seed: int) -> tuple[Case, Case, Case]:
    """Return a run with affinity, one with least busy, and one that loses a node."""
    count = min(max(_FEWEST, _PER_NODE * nodes), conversations_max)
    fewer, fewest = max(_FEWEST, count // _LEAST_BUSY_SHARE), max(_FEWEST, count // _LOST_SHARE)
    return (
        Case(nodes, count, seed),
        Case(nodes, min(count, fewer), seed, policy="least-busy"),
        Case(nodes, min(count, fewest), seed, loses_node=True),
    )


def run_all(all_cases: Sequence[Case]) -> Found:
    ordered = sorted(all_cases, key=lambda case: -case.conversations)
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        return dict(zip(ordered, pool.map(simulate, ordered), strict=True))


def row_of(row: Sequence[Case], found: Found) -> list[str]:
    ours, least_busy, lost = (found[case] for case in row)
    facts, costs, loss = ours.facts, ours.costs, lost.facts
    return [
        f"{row[0].nodes:,}",
        f"{row[0].conversations:,}",
        f"{costs['decision p50']:.0f}, {costs['decision p99']:.0f}",
        f"{costs['request']:.0f}",
        f"{facts['of ideal']:.2f}",
        f"{least_busy.facts['of ideal']:.2f}",
        f"{facts['nodes']:.2f}",
        f"{facts['clients']:.2f}",
        f"{facts['waited']:.1%}",
        f"{facts['wait p99']:.2f}",
        f"{loss['repeated']:,.0f} tokens",
        f"{loss['retried']:.0f}, {loss['cut']:.0f}",
        f"{facts['failed'] + least_busy.facts['failed'] + loss['failed']:.0f}",
        f"{costs['index MB']:.1f}",
    ]


def problems_of(row: Sequence[Case], found: Found) -> list[str]:
    unanswered = sum(found[entry].facts["failed"] + found[entry].facts["lost"] for entry in row)
    median_us = found[row[0]].costs["decision p50"]
    met = {
        f"every request gets a response ({unanswered:.0f} did not)": unanswered == 0,
        f"decisions under {_DECISION_US} µs ({median_us:.0f})": median_us < _DECISION_US,
    }
    return [f"{row[0].nodes} nodes: {goal}" for goal, is_met in met.items() if not is_met]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(_COLUMNS)} |")
    print(f"|{' --- |' * len(_COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _members(case: Case, figures: Figures) -> dict[str, object]:
    named = {"nodes": case.nodes, "conversations": case.conversations, "policy": case.policy}
    return {**named, "loses_node": case.loses_node, **figures.facts, **figures.costs}


if __name__ == "__main__":
    sys.exit(main())
