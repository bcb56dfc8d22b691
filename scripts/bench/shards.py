"""Measure a model over two workers, before and after `corral balance --apply`.

Both workers run here, and one of them is stopped for three quarters of the time. The model has
random weights: only its size matters.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support import tiny_gguf
from support.corral_cli import CorralCli
from support.slow_worker import worker

from scripts.bench.mixed_requests import session
from scripts.bench.rates import answer
from scripts.bench.result import Figure, Result
from scripts.bench.slow_down import slowed_down
from supervisor.builds import discover
from supervisor.builds.discover import Engine
from supervisor.system.paths import directories

BEFORE, AFTER = "before", "after"
WORKERS: Final = ("a", "b")
SHARE: Final = 0.25
# Each answer is one pass of each worker for each token; a decision takes 100.
ANSWERS: Final = 3
TOKENS: Final = 64
TOLERANCE: Final = 0.25


@dataclass(frozen=True)
class Round:
    """Tokens per second, the estimate, and how many times slower the slow worker was seen."""

    before: float
    after: float
    estimated: float
    seen: float

    @property
    def gained(self) -> float:
        return self.after / self.before


def main() -> int:
    """Measure, print, and return 1 where an estimate does not come true."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", choices=WORKERS, default="b", help="the slow worker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        path = Path(home) / "model.gguf"
        # About 1 ms for each layer and token on one core.
        model = tiny_gguf.make(path, embd=512, heads=8, kv_heads=4, layers=24, ff=2048)
        for number in range(options.repeats):
            rounds.append(_round(model, options.slow))
            result(rounds).write(options.json)  # in case the next round is cut short
            print(f"round {number + 1} of {options.repeats}: {rounds[-1]}", file=sys.stderr)
    found = result(rounds)
    for goal, is_met in found.goals.items():
        print(f"{'ok' if is_met else 'missed'}: {goal}")
    return 1 if found.missed else 0


def _round(model: Path, slow: str) -> Round:
    with tempfile.TemporaryDirectory(prefix="corral-") as home, ExitStack() as stack:
        engine = discover.load(None, cache_dir=directories().cache)
        ports = {
            name: stack.enter_context(_worker(engine, is_slow=name == slow)) for name in WORKERS
        }
        corral = CorralCli(Path(home))
        stack.callback(corral.end)
        corral.configure(_settings(model, ports))
        corral.ok("start")
        before = asyncio.run(_rate(corral.url))
        found = _balance(corral)
        corral.ok("balance", "m", "--apply")
        after = asyncio.run(_rate(corral.url))
        per_layer = {
            shard["shard_name"]: shard["avg_latency_per_layer_us"] for shard in found["shards"]
        }
        (other,) = (name for name in WORKERS if name != slow)
        return Round(before, after, found["estimated_speedup"], per_layer[slow] / per_layer[other])


def _balance(corral: CorralCli) -> Mapping[str, Any]:
    """Return the suggested moves; raises RuntimeError if there are none."""
    (found,) = corral.data("balance")
    if found["decision"] != "rebalance":
        raise RuntimeError(f"{found['decision']}: {found['reason']}")
    return dict(found)


async def _rate(url: str) -> float:
    async with session(url) as http:
        await answer(http, "first", 8)  # the first passes of a process are slower
        answers = [await answer(http, f"Story {number}", TOKENS) for number in range(ANSWERS)]
    return float(statistics.median(answer["predicted_per_second"] for answer in answers))


def _settings(model: Path, ports: Mapping[str, int]) -> str:
    workers = "".join(
        f'[workers.{name}]\naddress = "127.0.0.1:{port}"\n' for name, port in ports.items()
    )
    return (
        f'[models.m]\npath = "{model}"\nworkers = ["a", "b"]\n'
        f"[models.m.flags]\nthreads = 1\nparallel = 1\nctx-size = 2048\n{workers}"
    )


@contextmanager
def _worker(engine: Engine, *, is_slow: bool) -> Iterator[int]:
    """Run a worker, slowed down after it listens; yield its port."""
    with ExitStack() as stack:
        process, port = stack.enter_context(worker(engine))
        if is_slow:
            stack.enter_context(slowed_down(process.pid, SHARE))
        yield port


def result(rounds: Sequence[Round]) -> Result:
    ratios = [values.gained / values.estimated for values in rounds]
    median = statistics.median(ratios)
    seen = statistics.median(values.seen for values in rounds)
    gained = statistics.median(values.gained for values in rounds)
    spread = f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return Result(
        [
            Figure(
                "one stream over two workers",
                "tokens/s",
                {
                    BEFORE: [values.before for values in rounds],
                    AFTER: [values.after for values in rounds],
                },
                base=BEFORE,
            ),
            Figure(
                "speed-up",
                "",
                {
                    "estimated": [values.estimated for values in rounds],
                    "measured": [values.gained for values in rounds],
                },
                base="estimated",
            ),
        ],
        {
            f"the slow worker takes {seen:.1f} × as long per layer, 3 to 5": 3 <= seen <= 5,
            f"{gained:.2f} × as fast, more than before": gained > 1,
            f"{spread} of the estimate, within 25 %": abs(median - 1) <= TOLERANCE,
        },
        notes=["One worker is stopped for three quarters of every 10 ms."],
    )


if __name__ == "__main__":
    sys.exit(main())
