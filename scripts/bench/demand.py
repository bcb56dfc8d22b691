"""Compare slots that follow demand with a plain engine that has as many slots as clients.

`base` begins with its own number of slots. The clients send requests until `corral status` shows as
many slots as clients, and one instance that is ready; then their total rate is measured. Each round
starts both variants once for each number of clients, in a random order.

With `--turns`, the slots are set instead, both variants run at the same time, and the clients send
requests to one and to the other in turn. That depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
from support.corral_cli import CorralCli, until

from scripts.bench.mixed_requests import session
from scripts.bench.plain_engine import plain
from scripts.bench.rates import answer, together
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

PLAIN, CORRAL = "plain", "corral"
CLIENTS: Final = (1, 2, 4, 8, 16)
GOAL: Final = 0.95
TOKENS: Final = 64
SETTLED_WITHIN_S: Final = 180
# The engine's own context, for each slot.
CTX_SLOT: Final = 8192
# Demand is measured, not how soon it counts: that is a minute unless set.
SETTINGS: Final = """
[models.m]
path = "{model}"
[models.m.slots]
queued_s = 4
quiet_s = 600
"""
SET: Final = """
[models.m]
path = "{model}"
[models.m.flags]
parallel = {clients}
ctx-size = {ctx_size}
"""

Rounds = Sequence[Mapping[int, Mapping[str, float]]]


def main() -> int:
    """Measure, print, and return 1 where a total is below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N")
    parser.add_argument("--streams", action="store_true", help="clients ask for streams")
    parser.add_argument("--turns", type=int, metavar="N", help="set the slots; N turns each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = pinned.find_pin("smollm2").path(directories().models)
    rounds: list[Mapping[int, Mapping[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="corral-") as cache:
        if options.turns:
            turns = [
                _in_turns(model, cache, count, options.turns, streams=options.streams)
                for count in options.clients
            ]
            rounds += [
                dict(zip(options.clients, each, strict=True)) for each in zip(*turns, strict=True)
            ]
            result(rounds).write(options.json)
        else:
            for number in range(options.repeats):
                rng = random.Random(number)  # noqa: S311 (an order)
                rounds.append(
                    {
                        count: _both(model, cache, count, rng, streams=options.streams)
                        for count in options.clients
                    }
                )
                result(rounds).write(options.json)  # in case the next round is cut short
                print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
    found = result(rounds)
    for goal, is_met in found.goals.items():
        print(f"{'ok' if is_met else 'missed'}: {goal}")
    return 1 if found.missed else 0


def _both(
    model: Path, cache: str, clients: int, rng: random.Random, *, streams: bool
) -> Mapping[str, float]:
    totals = {}
    for name in rng.sample([PLAIN, CORRAL], 2):
        if name == PLAIN:
            with _plain(model, clients) as url:
                totals[name] = asyncio.run(_total(url, clients, streams=streams))
        else:
            with _settled(model, cache, clients) as url:
                totals[name] = asyncio.run(_total(url, clients, streams=streams))
    return totals


def _plain(model: Path, clients: int) -> AbstractContextManager[str]:
    slots = ("--parallel", str(clients), "--ctx-size", str(CTX_SLOT * clients))
    return plain("--model", model, "--alias", "m", *slots)


def _in_turns(
    model: Path, cache: str, clients: int, turns: int, *, streams: bool
) -> Sequence[Mapping[str, float]]:
    settings = SET.format(model=model, clients=clients, ctx_size=CTX_SLOT * clients)
    # Nothing follows the load here: the plain engine would count as load of another program.
    with (
        _plain(model, clients) as plain_url,
        _started(settings, cache, adaptive=False) as corral,
    ):
        urls = {PLAIN: plain_url, CORRAL: corral.url}
        return asyncio.run(_alternate(urls, clients, turns, streams=streams))


async def _alternate(
    urls: Mapping[str, str], clients: int, turns: int, *, streams: bool
) -> Sequence[Mapping[str, float]]:
    rng, totals = random.Random(clients), []  # noqa: S311 (an order)
    for turn in range(turns + 1):  # the first requests of a process are slower, and do not count
        found = {}
        for name in rng.sample([*urls], 2):
            async with session(urls[name]) as http:
                about = f"Turn {turn}, story"
                found[name] = await together(http, clients, TOKENS, streams=streams, about=about)
        totals.append(found)
    return totals[1:]


async def _total(url: str, clients: int, *, streams: bool) -> float:
    async with session(url) as http:
        # The first requests of a process are slower. Later prompts differ from these, which an
        # engine would find by accident in one slot or another.
        await together(http, clients, tokens=4, about="Warm-up")
        return await together(http, clients, TOKENS, streams=streams)


@contextmanager
def _started(settings: str, cache: str, *, adaptive: bool) -> Iterator[CorralCli]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home), measure_threads=True, adaptive=adaptive)
        corral.env["XDG_CACHE_HOME"] = cache
        corral.configure(settings)
        try:
            corral.ok("start")
            yield corral
        finally:
            corral.end()


@contextmanager
def _settled(model: Path, cache: str, clients: int) -> Iterator[str]:
    """Serve, and return once there are as many slots as clients."""
    with _started(SETTINGS.format(model=model), cache, adaptive=True) as corral:
        asyncio.run(_settle(corral, clients))
        yield corral.url


async def _settle(corral: CorralCli, clients: int) -> None:
    """Send requests until there are as many slots as clients.

    Raises:
        RuntimeError: That took too long.
    """
    is_over = asyncio.Event()
    async with session(corral.url) as http, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(_client(http, number, is_over))
        try:
            await asyncio.to_thread(
                until, lambda: _has_slots(corral, clients), within_s=SETTLED_WITHIN_S
            )
        except AssertionError as error:
            slots = corral.status().models[0].slots
            raise RuntimeError(
                f"{slots} slots for {clients} clients after {SETTLED_WITHIN_S} s"
            ) from error
        finally:
            is_over.set()


def _has_slots(corral: CorralCli, clients: int) -> bool:
    (model,) = corral.status().models
    ready = [instance for instance in model.instances if instance.state == "ready"]
    is_alone = len(model.instances) == len(ready) == 1
    return is_alone and model.slots >= clients and ready[0].slots >= clients


async def _client(http: aiohttp.ClientSession, number: int, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        await answer(http, f"Before {number}", TOKENS)


def result(rounds: Rounds) -> Result:
    ratios = {
        count: [values[count][CORRAL] / values[count][PLAIN] for values in rounds]
        for count in rounds[0]
    }
    return Result(
        [
            Figure(
                f"total at {count} clients",
                "tokens/s",
                {name: [values[count][name] for values in rounds] for name in (PLAIN, CORRAL)},
                base=PLAIN,
            )
            for count in rounds[0]
        ],
        dict(_judged(count, found) for count, found in ratios.items()),
        notes=["SmolLM2; plain has `--parallel` clients, and as much context for each slot."],
    )


def _judged(clients: int, ratios: Sequence[float]) -> tuple[str, bool]:
    median = statistics.median(ratios)
    spread = f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{clients} clients: {spread} of plain, at least {GOAL}", median >= GOAL


if __name__ == "__main__":
    sys.exit(main())
