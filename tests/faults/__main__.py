"""Injects faults into daemons on the real engine, and prints expected and observed results.

`scripts/faults` runs this.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import pace
from faults.daemon_under_test import DaemonUnderTest, Models
from faults.endurance import kill_often, restart_often
from faults.every import ABSENT, EVERY
from faults.fault import Fault, run
from support.corral_cli import CorralCli

from supervisor.builds.discover import load
from supervisor.system.paths import directories


def main() -> int:
    """Return 1 when any result was not as expected."""
    words = _words()
    # A shell that runs us in the background has us ignore Ctrl-C, and so would all we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = load(None, cache_dir=directories().cache)
    print(f"engine: build {engine.build}, {engine.path}", flush=True)
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        models = Models.make(Path(directory), engine)
        if words.kills:
            return _kills(models, words.kills, words.seed)
        if words.restarts:
            return _restarts(models, words.restarts)
        chosen = [fault for fault in EVERY if fault.quick or not words.quick]
        wanted = [entry for entry in chosen if not words.only or entry.number in words.only]
        return _faults(models, wanted, words.jobs)


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only those of the test suite")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only these")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="COUNT",
        help="how many at once; scales the limits",
    )
    parser.add_argument("--kills", type=int, metavar="COUNT", help="kill at random, so often")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--restarts", type=int, metavar="COUNT", help="restart, so often")
    return parser.parse_args()


def _faults(models: Models, faults: list[Fault], jobs: int) -> int:
    different = 0
    pace.slack = float(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda fault: run(fault, models), faults)
        for fault, result in zip(faults, results, strict=True):
            different += not result.is_same
            mark = "ok       " if result.is_same else "DIFFERENT"
            print(f"{mark} {fault.number:2} {fault.name}\n             expected: {result.expected}")
            print(f"             seen:     {result.seen}", flush=True)
    print(f"\n{len(faults)} faults, {different} different from what is expected")
    for number, reason in ABSENT.items():
        print(f"not here: {number:2} {reason}")
    return 1 if different else 0


def _kills(models: Models, count: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        target = DaemonUnderTest(CorralCli(Path(directory)), models)
        kills = kill_often(target, count, seed)
        target.corral.end()
    print(
        f"{kills.daemons} daemons and {kills.engines} engines killed (seed {seed}): "
        f"{kills.orphans} orphans; the last engine was gone {kills.longest_s:.2f} s "
        "after its daemon at the latest"
    )
    return 1 if kills.orphans else 0


def _restarts(models: Models, count: int) -> int:
    with tempfile.TemporaryDirectory(prefix="c") as directory:
        target = DaemonUnderTest(CorralCli(Path(directory)), models)
        target.serve({"m": models.tiny})
        kept = restart_often(target, count)
        target.corral.end()
    print(
        f"{count} restarts in {kept.took_s:.0f} s: {kept.zombies} zombies, files open "
        f"{kept.files_before} before and {kept.files_after} after, memory "
        f"{kept.memory_grown_bytes / 1024**2:+.1f} MiB"
    )
    return 1 if kept.zombies or kept.files_after > kept.files_before else 0


if __name__ == "__main__":
    sys.exit(main())
