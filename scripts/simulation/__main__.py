"""Simulate up to a thousand nodes behind the real router and prefix index, and print a table.

The engines only count, in virtual time, so all facts are the same for a seed on any machine; the
processor time of decisions is this machine's. Cases run beside each other, one for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from scripts.simulation.engine import Machine
from scripts.simulation.outcome import Figures, simulate
from scripts.simulation.run import Case, Rule
from scripts.simulation.workload import STAGES

_NODES: Final = "1,3,10,30,100,300,1000"
_PER_NODE: Final = 100
_FEWEST: Final = 300
# Of the conversations, how many the two other runs of a number of nodes have.
_LEAST_BUSY_SHARE: Final = 3
_LOST_SHARE: Final = 5
_DECISION_US: Final = 100

Found = Mapping[Case, Figures]
Row = Sequence[Case]


@dataclass(frozen=True, slots=True)
class Study:
    """The contents of one table.

    Attributes:
        rows: The cases of each row.
        cells: The figures of a row, as text.
        problems: The faults of a row.
    """

    columns: Sequence[str]
    rows: Callable[[argparse.Namespace], Iterator[Row]]
    cells: Callable[[Row, Found], list[str]]
    problems: Callable[[Row, Found], list[str]]


def main() -> int:
    """Return 1 if a request got no response or a decision took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("study", nargs="?", choices=tuple(_STUDIES), default="nodes", help=_HELP)
    parser.add_argument("--nodes", default=_NODES, help=f"numbers of nodes, default {_NODES}")
    parser.add_argument("--conversations", type=int, default=30_000, help="at most, of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, help="number of them, for prefixes")
    parser.add_argument(
        "--machine", choices=tuple(_MACHINES), default="llama-server", help="for prefixes"
    )
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    options.nodes = [int(part) for part in options.nodes.split(",")]
    if options.quick:
        options.nodes = [node for node in options.nodes if node <= 100]
        options.conversations, options.seeds = 3000, 1
    study = _STUDIES[options.study]
    rows = list(study.rows(options))
    found = run_all([case for row in rows for case in row])
    print(f"| {' | '.join(study.columns)} |")
    print(f"|{' --- |' * len(study.columns)}")
    for row in rows:
        print(f"| {' | '.join(study.cells(row, found))} |")
    if options.json:
        options.json.write_text(
            json.dumps(
                [
                    {"case": asdict(case), **figures.facts, **figures.costs}
                    for case, figures in found.items()
                ],
                indent=1,
            )
        )
    problems = [problem for row in rows for problem in study.problems(row, found)]
    for problem in problems:
        print(f"missed: {problem}")
    return 1 if problems else 0


def run_all(all_cases: Sequence[Case]) -> Found:
    ordered = sorted(all_cases, key=lambda case: -case.conversations)
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        return dict(zip(ordered, pool.map(simulate, ordered), strict=True))


def unanswered(row: Row, found: Found) -> list[str]:
    count = sum(found[case].facts["failed"] + found[case].facts["lost"] for case in row)
    missed = f"{row[0].nodes} nodes: every request gets a response ({count:.0f} did not)"
    return [missed] if count else []


# Conversations: affinity, least busy, and a node that is lost.


def node_rows(options: argparse.Namespace) -> Iterator[Row]:
    for nodes in options.nodes:
        count = min(max(_FEWEST, _PER_NODE * nodes), options.conversations)
        fewer, fewest = max(_FEWEST, count // _LEAST_BUSY_SHARE), max(_FEWEST, count // _LOST_SHARE)
        yield (
            Case(nodes, count, options.seed),
            Case(nodes, min(count, fewer), options.seed, policy="least-busy"),
            Case(nodes, min(count, fewest), options.seed, loses_node=True),
        )


def node_cells(row: Row, found: Found) -> list[str]:
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


def node_problems(row: Row, found: Found) -> list[str]:
    median_us = found[row[0]].costs["decision p50"]
    slow = f"{row[0].nodes} nodes: decisions under {_DECISION_US} µs ({median_us:.0f})"
    return [*unanswered(row, found), *([slow] if median_us >= _DECISION_US else ())]


# llm-d's benchmark: each policy, with several seeds.

# Output of the published cluster when it is full, in tokens per second.
_PUBLISHED_TPS: Final = 14_000
_REPLICAS: Final = 8
_RULES: Final[Sequence[Rule]] = ("oracle", "affinity", "least-busy", "round-robin")
_SHOWN_RATES: Final = (3, 15, 25, 60)
_MACHINES: Final = {
    "llama-server": Machine(32, 3000, 60, 0.04, cache_tokens=1_050_000),
    "small-memory": Machine(32, 3000, 60, 0.04, cache_tokens=307_328),
    "vllm": Machine(256, 5000, 90, 0.04, cache_tokens=307_328, is_paged=True),
}


def prefix_rows(options: argparse.Namespace) -> Iterator[Row]:
    machine = _MACHINES[options.machine]
    rate = 1.0 if machine.is_paged else machine.answers_tps * _REPLICAS / _PUBLISHED_TPS
    for policy in _RULES:
        case = Case(_REPLICAS, 0, 0, STAGES, policy, machine=machine, rate=rate)
        yield [replace(case, seed=options.seed + more) for more in range(options.seeds)]


def prefix_cells(row: Row, found: Found) -> list[str]:
    oracle = [found[replace(case, policy=_RULES[0])].facts for case in row]
    facts = [found[case].facts for case in row]

    def ratio(name: str) -> str:
        return spread([ours[name] / best[name] for ours, best in zip(facts, oracle, strict=True)])

    tokens = [ours["prefilled"] / ours["requests"] for ours in facts]
    return [
        row[0].policy,
        *(
            f"{spread([ours[f'first token {rate}'] for ours in facts])}, "
            f"{spread([ours[f'first token p90 {rate}'] for ours in facts])}"
            for rate in _SHOWN_RATES
        ),
        spread([ours["answers per s all"] for ours in facts]),
        spread([ours["good per s all"] for ours in facts]),
        spread(tokens, 0),
        f"{ratio('first token all')}, {ratio('answers per s all')}",
    ]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, with the least and the greatest if these differ visibly."""
    mean, least, most = (
        f"{value:,.{digits}f}" for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if least == most else f"{mean} ({least}–{most})"


# Several fronts: gain and cost of digests.


def front_rows(options: argparse.Namespace) -> Iterator[Row]:
    for nodes in options.nodes:
        count = min(max(_FEWEST, _PER_NODE * nodes), options.conversations)
        one, two = Case(nodes, count, options.seed), Case(nodes, count, options.seed, fronts=2)
        yield [replace(one, policy="rendezvous")]
        yield [one]
        yield [replace(one, has_digests=True)]
        yield [two]
        yield [replace(two, is_sticky=True)]
        yield [replace(two, has_digests=True)]


def front_cells(row: Row, found: Found) -> list[str]:
    (case,) = row
    facts, costs = found[case].facts, found[case].costs
    return [
        f"{case.nodes:,}",
        f"{case.conversations:,}",
        "hashing" if case.policy == "rendezvous" else f"{case.fronts}",
        "sticky" if case.is_sticky else "by chance" if case.fronts > 1 else "",
        "yes" if case.has_digests else "no",
        f"{facts['found']:.1%}",
        f"{facts['of ideal']:.2f}",
        f"{facts['first token all']:.2f}, {facts['first token p90 all']:.2f}",
        f"{costs['request']:.0f}",
        f"{costs['digests']:.0f}",
        f"{facts['digest bytes']:.0f}",
        f"{facts['digest reads per s'] / case.fronts:.0f}",
        f"{costs['reports MB']:.1f}",
    ]


_HELP: Final = "many nodes, llm-d's shared prefixes on eight nodes, or several fronts"
_STUDIES: Final = {
    "nodes": Study(
        (
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
        ),
        node_rows,
        node_cells,
        node_problems,
    ),
    "prefixes": Study(
        (
            "policy",
            *(f"first token at {rate}/s: mean, p90, s" for rate in _SHOWN_RATES),
            "answers per s",
            "of these good",
            "prompt tokens computed",
            "of the oracle: first token, answers",
        ),
        prefix_rows,
        prefix_cells,
        unanswered,
    ),
    "fronts": Study(
        (
            "nodes",
            "conversations",
            "fronts",
            "turns",
            "digests",
            "conversations found",
            "tokens, of ideal",
            "first token: mean, p90, s",
            "router per request, µs",
            "digests per request, µs",
            "bytes per request",
            "reads per s and front",
            "reports, MB",
        ),
        front_rows,
        front_cells,
        unanswered,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
