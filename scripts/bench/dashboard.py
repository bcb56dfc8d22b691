"""Measure the cost of an open dashboard: tokens per second of 16 streams, processor time, memory.

Rounds with and without a listener of the live stream take turns on one daemon, in random order, so
that other work of the machine affects both. The engine and the clients share the cores with the
daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import psutil
from support import tiny_gguf
from support.corral_cli import CorralCli

from scripts.bench import overhead_load as load
from scripts.bench.result import Figure, Result

_STREAMS: Final = 16
_TOKENS: Final = 200
_SHARE_MIN: Final = 0.98
_GROWTH_MAX_MB: Final = 10
_WITH, _WITHOUT = "open", "closed"


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    parser.add_argument("--seconds", type=float, default=4, help="of a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        corral = CorralCli(Path(directory))
        model = tiny_gguf.make_slow(Path(directory) / "tiny.gguf")
        flags = f"parallel = {_STREAMS}\nctx-size = {_STREAMS * 512}\n"
        corral.configure(f'[models.bench]\npath = "{model}"\n[models.bench.flags]\n{flags}')
        corral.ok("start")
        try:
            found = asyncio.run(_measure(corral, options.rounds, options.seconds))
        finally:
            corral.end()
    for figure in found.figures:
        shown = {name: round(statistics.median(value), 2) for name, value in figure.values.items()}
        print(f"{figure.name} ({figure.unit}): {shown}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'MISSED'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


async def _measure(corral: CorralCli, rounds: int, seconds: float) -> Result:
    names = [_WITH, _WITHOUT] * rounds
    random.Random(0).shuffle(names)  # noqa: S311 (an order, no secret)
    tokens: dict[str, list[float]] = {_WITH: [], _WITHOUT: []}
    cpu: dict[str, list[float]] = {_WITH: [], _WITHOUT: []}
    rss: dict[str, list[float]] = {_WITH: [], _WITHOUT: []}
    process = psutil.Process(corral.daemon_pid)
    await _round(corral, process, seconds)  # warm-up
    rss[_WITHOUT].append(process.memory_info().rss / 1e6)
    async with _signed_in(corral) as http:
        for name in names:
            async with _listening(http, is_open=name == _WITH):
                speed, cpu_s = await _round(corral, process, seconds)
                rss[name].append(process.memory_info().rss / 1e6)
            tokens[name].append(speed)
            cpu[name].append(cpu_s)
    return _result(tokens, cpu, rss)


def _result(
    tokens: dict[str, list[float]], cpu: dict[str, list[float]], rss: dict[str, list[float]]
) -> Result:
    share = statistics.median(tokens[_WITH]) / statistics.median(tokens[_WITHOUT])
    growth_mb = max(rss[_WITH]) - rss[_WITHOUT][0]
    return Result(
        [
            Figure(f"tokens of {_STREAMS} streams", "1/s", tokens, base=_WITHOUT),
            Figure("processor time of the daemon", "µs/token", cpu, base=_WITHOUT),
            Figure("resident memory", "MB", rss),
        ],
        goals={
            f"{share:.1%} of the tokens per second, at least {_SHARE_MIN:.0%}": share >= _SHARE_MIN,
            f"{growth_mb:.1f} MB more memory, at most {_GROWTH_MAX_MB} MB": growth_mb
            <= _GROWTH_MAX_MB,
        },
    )


async def _round(corral: CorralCli, process: psutil.Process, seconds: float) -> tuple[float, float]:
    """Tokens per second, and microseconds of processor time for each."""
    port = int(corral.url.rpartition(":")[2])
    before = process.cpu_times()
    samples = await load.concurrent(
        port, load.body(is_stream=True, tokens=_TOKENS), _STREAMS, seconds
    )
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return samples.tokens / samples.duration_s, 1e6 * cpu_s / samples.tokens


@asynccontextmanager
async def _signed_in(corral: CorralCli) -> AsyncIterator[aiohttp.ClientSession]:
    link = json.loads(corral.ok("ui", "--no-browser", "--json"))["data"]["url"]
    jar = aiohttp.CookieJar(unsafe=True)  # for an address
    async with aiohttp.ClientSession(corral.url, cookie_jar=jar) as http:
        body, headers = {"token": link.partition("=")[2]}, {"Origin": corral.url}
        async with http.post("/corral/v1/session", json=body, headers=headers) as response:
            response.raise_for_status()
            http.headers["X-Corral-Session"] = (await response.json())["page_token"]
        yield http


@asynccontextmanager
async def _listening(http: aiohttp.ClientSession, *, is_open: bool) -> AsyncIterator[None]:
    if not is_open:
        yield
        return
    limit = aiohttp.ClientTimeout(total=None)
    async with (
        http.get("/corral/v1/live?logs=bench.0", timeout=limit) as response,
        asyncio.TaskGroup() as group,
    ):
        reading = group.create_task(_read(response))
        yield
        reading.cancel()


async def _read(response: aiohttp.ClientResponse) -> None:
    with suppress(aiohttp.ClientError):
        async for _ in response.content.iter_any():
            pass


if __name__ == "__main__":
    sys.exit(main())
