"""Measure the overhead of the proxy and of others in front of an engine that costs almost nothing.

Every front is pinned to one core, the engine and the client to the others. Repeats are interleaved:
each measures every front, in random order.

    added           first byte of a stream at one connection, minus that of a direct request; also
                    with an engine that takes 5 ms to its first token (slow engine)
    corral, times   corral's figure as a multiple of that of the front in the column
    req/core-s      JSON responses at 32 connections per CPU second of the front
    streams/core-s  the same with streams of 8 tokens
    first token     at 64 streams of 100 tokens a second each, started one after another
    gap p99         between two tokens of these streams
    tokens          received from them, compared with direct requests
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
from scripts.bench.overhead_fronts import (
    Front,
    Setup,
    free_port,
    start_engine,
    start_fronts,
    stop,
)
from scripts.bench.overhead_report import (
    Figures,
    Target,
    percentile_ms,
    result_of,
    table,
    targets_of,
)
from scripts.bench.result import Result

_CONNECTIONS: Final = 32
_SHORT_STREAM_TOKENS: Final = 8
_STREAMS: Final = 64
_STREAM_TOKENS: Final = 50
_PAUSE_US: Final = 10_000
_WAIT_US: Final = 5_000
_HELD_PAUSE_US: Final = 500_000
_MAX_FILES: Final = 16_384


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        requests: At one connection, per repeat; half as many of a slow engine.
        seconds: Length of each of the three concurrent measurements of a repeat.
        held: Slow streams held at once.
        held_tokens: Tokens of each, two a second.
    """

    repeats: int
    requests: int
    seconds: float
    held: int
    held_tokens: int


FULL: Final = Size(repeats=5, requests=400, seconds=4, held=1000, held_tokens=40)
QUICK: Final = Size(repeats=3, requests=100, seconds=1.5, held=200, held_tokens=12)


def main() -> int:
    """Print the results; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--litellm", default=shutil.which("litellm"), help="LiteLLM's program")
    parser.add_argument("--smg", default=shutil.which("smg"), help="smg's program")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIRECTORY",
        help="checkout of another commit of this project, measured beside this one",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("overhead needs two cores: one for the fronts, one for the client", file=sys.stderr)
        return 2
    _raise_file_limit()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        started: list[psutil.Popen] = []
        setup = Setup(
            directory=Path(directory),
            socket=Path(directory) / "engine.sock",
            kept_socket=Path(directory) / "kept.sock",
            engine_port=free_port(),
            litellm=options.litellm,
            smg=options.smg,
            against=options.against,
            core=cores[-1],
        )
        try:
            started.append(start_engine(setup, {cores[0]}))
            fronts = start_fronts(setup, started)
            print(f"measured: {', '.join(front.name for front in fronts)}")
            os.sched_setaffinity(0, {cores[-2]})
            size = QUICK if options.quick else FULL
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(_measure(fronts, size))
        finally:
            stop(started)
    found.write(options.json)
    return 1 if found.missed else 0


async def _measure(fronts: Sequence[Front], size: Size) -> Result:
    for front in fronts:
        for is_stream in (True, False):  # warm-up
            await load.sequential(front.port, load.body(is_stream=is_stream), 50)
    runs: list[dict[str, Figures]] = []
    for number in range(size.repeats):
        order = random.Random(number).sample(fronts, len(fronts))  # noqa: S311 (an order, no secret)
        runs.append({front.name: await _figures(front, size) for front in order})
    for line in table([front.name for front in fronts], runs):
        print(line)
    targets = [*targets_of(runs), await _hold_streams(fronts, size)]
    for target in targets:
        print(target)
    return result_of(runs, targets)


async def _figures(front: Front, size: Size) -> Figures:
    single = await load.sequential(front.port, load.body(is_stream=True), size.requests)
    late_body = load.body(is_stream=True, wait_us=_WAIT_US)
    late = await load.sequential(front.port, late_body, size.requests // 2)
    json, json_per_core_s = await _per_core_s(front, load.body(is_stream=False), size)
    short = load.body(is_stream=True, tokens=_SHORT_STREAM_TOKENS)
    _, streams_per_core_s = await _per_core_s(front, short, size)
    content = load.body(is_stream=True, tokens=_STREAM_TOKENS, pause_us=_PAUSE_US)
    before_s = front.cpu_s()
    stagger_s = _STREAM_TOKENS * _PAUSE_US / 1e6 / _STREAMS
    streams = await load.concurrent(front.port, content, _STREAMS, size.seconds, stagger_s)
    return Figures(
        byte_p50=percentile_ms(single.first_s, 50),
        byte_p99=percentile_ms(single.first_s, 99),
        late_p50=percentile_ms(late.first_s, 50),
        json_per_core_s=json_per_core_s,
        streams_per_core_s=streams_per_core_s,
        per_s=json.responses / json.duration_s,
        token_p50=percentile_ms(streams.first_s, 50),
        token_p99=percentile_ms(streams.first_s, 99),
        gap_p99=percentile_ms(streams.gap_s, 99),
        tokens_per_s=streams.tokens / streams.duration_s,
        core=(front.cpu_s() - before_s) / streams.duration_s,
    )


async def _per_core_s(front: Front, content: bytes, size: Size) -> tuple[load.Samples, float]:
    before_s = front.cpu_s()
    samples = await load.concurrent(front.port, content, _CONNECTIONS, size.seconds)
    used_s = front.cpu_s() - before_s
    return samples, samples.responses / used_s if used_s else 0.0


async def _hold_streams(fronts: Sequence[Front], size: Size) -> Target:
    """Hold many slow streams; measure the memory of this proxy, and of nginx for comparison."""
    growth = [1.0]
    content = load.body(is_stream=True, tokens=size.held_tokens, pause_us=_HELD_PAUSE_US)
    for front in (front for front in fronts if front.name in {"corral", "nginx"}):
        readings = [front.rss_mb()]
        whole_s = size.held_tokens * _HELD_PAUSE_US / 1e6
        async with asyncio.TaskGroup() as group:
            held = group.create_task(load.concurrent(front.port, content, size.held, seconds=0))
            for _ in range(3):
                await asyncio.sleep(whole_s / 4)
                readings.append(front.rss_mb())
        readings.append(front.rss_mb())
        shown = ", ".join(f"{mb:.1f}" for mb in readings)
        print(f"{front.name}: {held.result().responses} streams held; RSS in MB before, early,")
        print(f"    midway, late and after: {shown}")
        if front.name == "corral":
            growth = [readings[3] / readings[1]]
    return Target(f"memory while {size.held} streams run, late against early", 1.02, growth)


def _raise_file_limit() -> None:
    """For this process and those that it starts: each stream takes two sockets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MAX_FILES), hard))


if __name__ == "__main__":
    sys.exit(main())
