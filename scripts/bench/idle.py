"""Measure CPU time, wake-ups and memory of an idle daemon with four idle engines.

The engines are not counted. RSS decides: it counts shared libraries in full, as `ps` and `top` do.
PSS counts each shared page by its share, USS not at all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from support import tiny_gguf
from support.corral_cli import CorralCli

from scripts.bench.result import Result, one_round

ENGINES = 4
CPU_MAX = 0.4 / 100
MEMORY_MAX_MB = 75
# Warm-up, first samples and late imports have ended by then.
SETTLED_S = 5


@dataclass(frozen=True)
class Cost:
    """CPU and memory of a process.

    Attributes:
        cpu: Share of one core, 0 to 1.
        wakeups_per_s: Voluntary context switches per second.
        rss_mb: Resident memory, in millions of bytes; the others likewise.
    """

    cpu: float
    wakeups_per_s: float
    rss_mb: float
    pss_mb: float
    uss_mb: float

    @property
    def is_low(self) -> bool:
        return self.cpu <= CPU_MAX and self.rss_mb <= MEMORY_MAX_MB


def main() -> int:
    """Measure, print, and return 1 above a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    seconds = options.seconds
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        # No variable with a setting: the module that reads these takes memory.
        corral = CorralCli(Path(directory), measure_threads=True, adaptive=True)
        model = tiny_gguf.make(Path(directory) / "tiny.gguf")
        corral.configure(
            f'[models.tiny]\npath = "{model}"\nreplicas = {ENGINES}\n'
            "[supervisor]\nmeasure_threads = false\n"
        )
        corral.ok("start")
        time.sleep(SETTLED_S)
        cost = measure(psutil.Process(corral.daemon_pid), seconds)
        corral.end()
    print(
        f"idle daemon, {ENGINES} idle engines, {seconds:g} s: {cost.cpu:.2%} of one core, "
        f"{cost.wakeups_per_s:.1f} wake-ups/s, "
        f"RSS {cost.rss_mb:.1f} MB (PSS {cost.pss_mb:.1f}, USS {cost.uss_mb:.1f})"
    )
    result(cost).write(options.json)
    if not cost.is_low:
        print(f"above the limit of {CPU_MAX:.1%} of a core or {MEMORY_MAX_MB} MB of RSS")
    return 0 if cost.is_low else 1


def result(cost: Cost) -> Result:
    cpu, memory = f"{cost.cpu:.2%} of one core", f"{cost.rss_mb:.1f} MB of resident memory"
    return Result(
        [
            one_round("processor time", "% of a core", {"corral": 100 * cost.cpu}),
            one_round("wake-ups", "1/s", {"corral": cost.wakeups_per_s}),
            one_round("resident memory (RSS)", "MB", {"corral": cost.rss_mb}),
            one_round("of these its own (USS)", "MB", {"corral": cost.uss_mb}),
        ],
        goals={
            f"{cpu}, at most {CPU_MAX:.1%}": cost.cpu <= CPU_MAX,
            f"{memory}, at most {MEMORY_MAX_MB} MB": cost.rss_mb <= MEMORY_MAX_MB,
        },
        notes=[f"{ENGINES} idle engines of a tiny model, whose own cost is not counted."],
    )


def measure(process: psutil.Process, seconds: float) -> Cost:
    """Measure a process for some seconds."""
    before, switches = process.cpu_times(), process.num_ctx_switches().voluntary
    time.sleep(seconds)
    after, memory = process.cpu_times(), process.memory_full_info()
    return Cost(
        cpu=(after.user + after.system - before.user - before.system) / seconds,
        wakeups_per_s=(process.num_ctx_switches().voluntary - switches) / seconds,
        rss_mb=memory.rss / 1e6,
        pss_mb=memory.pss / 1e6,
        uss_mb=memory.uss / 1e6,
    )


if __name__ == "__main__":
    sys.exit(main())
