"""Measure what the proxy adds, beside others, in front of an engine that costs almost nothing.

Every front is pinned to one core, the engine and the client to the others. Repeats are interleaved:
each one asks every front in turn, in an order of its own.

    added        first byte of a stream at one connection, less that of asking the engine directly
    req/core-s   whole answers at 32 connections, for each second of the front's processor time
    first token  at 64 streams of 100 tokens a second each, begun one by one and then again
    gap p99      between two tokens there
    tokens       that came in those seconds, against asking directly
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import uvloop

from scripts.bench import overhead_load as load
from scripts.bench import overhead_rivals as rivals
from scripts.bench.overhead_report import (
    Figures,
    Target,
    percentile_ms,
    spread,
    table,
    targets_of,
)

_CONNECTIONS: Final = 32
_STREAMS: Final = 64
_STREAM_TOKENS: Final = 50
_PAUSE_US: Final = 10_000
_HOLD_PAUSE_US: Final = 500_000
_FILES: Final = 16_384


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        repeats: Rounds through all fronts.
        asks: Requests at one connection in a repeat.
        seconds: Length of each of the two crowds of a repeat.
        held: Streams held at once.
        held_tokens: Tokens of each of them, two a second.
    """

    repeats: int
    asks: int
    seconds: float
    held: int
    held_tokens: int


FULL: Final = Size(repeats=5, asks=400, seconds=4, held=1000, held_tokens=40)
QUICK: Final = Size(repeats=3, asks=100, seconds=1.5, held=200, held_tokens=12)


def main() -> int:
    """Measure, print, and return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--litellm", default=shutil.which("litellm"), help="LiteLLM's program")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("a second core is needed: the client would measure itself", file=sys.stderr)
        return 2
    _raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        started: list[psutil.Popen] = []
        try:
            fronts = _start(Path(directory), cores, options.litellm, started)
            os.sched_setaffinity(0, {cores[-2]})
            size = QUICK if options.quick else FULL
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                targets = runner.run(_measure(fronts, size))
        finally:
            rivals.stop(started)
    return 0 if all(target.is_met for target in targets) else 1


def _start(
    home: Path, cores: Sequence[int], litellm: str | None, started: list[psutil.Popen]
) -> list[rivals.Front]:
    """Start the engine and every front; what was started is in `started` whatever happens."""
    place = rivals.Place(
        home=home,
        socket=home / "engine.sock",
        kept_socket=home / "kept.sock",
        engine_port=rivals.free_port(),
        litellm=litellm,
        core=cores[-1],
    )
    started.append(rivals.engine(place, {cores[0]}))
    fronts = rivals.fronts(place, started)
    print(f"asked: {', '.join(front.name for front in fronts)}")
    return fronts


async def _measure(fronts: Sequence[rivals.Front], size: Size) -> list[Target]:
    for front in fronts:  # what is slow only the first time is not what is measured
        await load.rounds(front.port, load.body(is_stream=True), 50)
    runs: list[dict[str, Figures]] = []
    for number in range(size.repeats):
        order = random.Random(number).sample(fronts, len(fronts))  # noqa: S311 (an order, no secret)
        runs.append({front.name: await _figures(front, size) for front in order})
    for line in table([front.name for front in fronts], runs):
        print(line)
    targets = [*targets_of(runs), await _held(fronts, size)]
    for target in targets:
        verdict = "ok" if target.is_met else "MISSED"
        print(f"{target.what}: {spread(target.values)}, at most {target.most:g}: {verdict}")
    return targets


async def _figures(front: rivals.Front, size: Size) -> Figures:
    one = await load.rounds(front.port, load.body(is_stream=True), size.asks)
    used_s = front.cpu_s()
    many = await load.crowd(front.port, load.body(is_stream=False), _CONNECTIONS, size.seconds)
    used_s = front.cpu_s() - used_s
    content = load.body(is_stream=True, tokens=_STREAM_TOKENS, pause_us=_PAUSE_US)
    before_s = front.cpu_s()
    apart_s = _STREAM_TOKENS * _PAUSE_US / 1e6 / _STREAMS
    streams = await load.crowd(front.port, content, _STREAMS, size.seconds, apart_s)
    return Figures(
        byte_p50=percentile_ms(one.first_s, 50),
        byte_p99=percentile_ms(one.first_s, 99),
        per_core_s=many.answers / used_s if used_s else 0.0,
        per_s=many.answers / many.took_s,
        token_p50=percentile_ms(streams.first_s, 50),
        token_p99=percentile_ms(streams.first_s, 99),
        gap_p99=percentile_ms(streams.gap_s, 99),
        tokens_per_s=streams.tokens / streams.took_s,
        core=(front.cpu_s() - before_s) / streams.took_s,
    )


async def _held(fronts: Sequence[rivals.Front], size: Size) -> Target:
    """Hold many slow streams and watch the memory of this proxy, and of nginx for comparison."""
    growth = [1.0]
    content = load.body(is_stream=True, tokens=size.held_tokens, pause_us=_HOLD_PAUSE_US)
    for front in (front for front in fronts if front.name in {"corral", "nginx"}):
        readings = [front.rss_mb()]
        whole_s = size.held_tokens * _HOLD_PAUSE_US / 1e6
        async with asyncio.TaskGroup() as group:
            crowd = group.create_task(load.crowd(front.port, content, size.held, seconds=0))
            for _ in range(3):
                await asyncio.sleep(whole_s / 4)
                readings.append(front.rss_mb())
        readings.append(front.rss_mb())
        told = ", ".join(f"{mb:.1f}" for mb in readings)
        print(f"{front.name}: {crowd.result().answers} streams held; RSS in MB before, early,")
        print(f"    midway, late and after: {told}")
        if front.name == "corral":
            growth = [readings[3] / readings[1]]
    return Target(f"memory while {size.held} streams run, late against early", 1.02, growth)


def _raise_file_limit() -> None:
    """Let this process and those that it starts open a socket for each stream, twice."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILES), hard))


if __name__ == "__main__":
    sys.exit(main())
