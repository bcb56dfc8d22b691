"""Measure all parts of the comparison, and write docs/benchmarks.md.

A part that fails, or that takes longer than its limit, is named with its error; the others remain.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from scripts.bench.page import About, PartOutcome, page
from scripts.bench.parts import PARTS, Part
from scripts.bench.result import Result, read
from supervisor import __version__
from supervisor.builds.discover import load
from supervisor.errors import CorralError
from supervisor.system import machine
from supervisor.system.paths import directories

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = ROOT / "docs" / "benchmarks.md"
# Half a minute less than promised, for a part that must be stopped.
FULL_S, QUICK_S = 39.5 * 60, 7.5 * 60
_STOP_S: Final = 20
_EXIT: Final = "exit code"
_LINES_SHOWN: Final = 3


def main() -> int:
    """Measure; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [Path(part.script).name for part in PARTS]
    parser.add_argument("parts", nargs="*", choices=[[], *names], default=[], help="default: all")
    parser.add_argument("--quick", action="store_true", help="at most 8 minutes instead of 40")
    parser.add_argument("--output", type=Path, default=PAGE, help="default: docs/benchmarks.md")
    options = parser.parse_args()
    chosen = [part for part in PARTS if Path(part.script).name in (options.parts or names)]
    deadline_s = time.monotonic() + (QUICK_S if options.quick else FULL_S)
    about, outcomes = _about(is_quick=options.quick), list[PartOutcome]()
    options.output.parent.mkdir(exist_ok=True)
    for part in chosen:
        left_s = deadline_s - time.monotonic()
        outcomes.append(outcome(part, left_s, is_quick=options.quick))
        _report(outcomes[-1])
        options.output.write_text(page(about, outcomes), "utf-8")
    print(options.output)
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def outcome(part: Part, left_s: float, *, is_quick: bool) -> PartOutcome:
    """Run one part, for at most as long as is left."""
    words, limit_s = (part.quick, part.quick_s) if is_quick else (part.full, part.full_s)
    limit_s = min(limit_s, left_s)
    if limit_s <= 0:
        return PartOutcome(part, 0, problem="no time was left for it")
    began_at_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="b") as directory:
        file = Path(directory) / "result.json"
        problem = _run([str(ROOT / part.script), *words, "--json", str(file)], limit_s, directory)
        result = _read(file)
    took_s = time.monotonic() - began_at_s
    if result and result.missed and problem and problem.startswith(_EXIT):
        problem = None  # the page lists the goals, and which of them were missed
    return PartOutcome(part, took_s, result, problem or (None if result else "it wrote no result"))


def _run(argv: Sequence[str], limit_s: float, directory: str) -> str | None:
    """Run a script in a new process group and directory; return why it failed, or None."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "TMPDIR": directory},
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than {limit_s:.0f} s"
        finally:
            _stop(process)
            _stop_all_below(directory)
        output.seek(0)
        last = output.read().decode(errors="replace").splitlines()[-_LINES_SHOWN:]
    return f"{_EXIT} {process.returncode}: {' / '.join(last)}" if process.returncode else None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a script, so that it ends its children; kill it if it does not."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stop_all_below(directory: str) -> None:
    """End daemons and engines that a script left behind, for example because it was stopped."""
    left = [process for process in psutil.process_iter() if _names(process, directory)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(left, _STOP_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, _STOP_S)


def _names(process: psutil.Process, directory: str) -> bool:
    """Return whether a process was started with this directory for temporary files."""
    try:
        return process.environ().get("TMPDIR") == directory
    except psutil.Error:
        return False


def _read(file: Path) -> Result | None:
    try:
        return read(file)
    except (OSError, ValueError):
        return None


def _report(done: PartOutcome) -> None:
    missed = done.result.missed if done.result else []
    verdict = done.problem or (f"missed: {missed}" if missed else "ok")
    print(f"{done.part.name}, {done.took_s:.0f} s: {verdict}", file=sys.stderr)


def _about(*, is_quick: bool) -> About:
    found = machine.read()
    rows = {
        "llama-corral": f"{__version__}, {_commit()}",
        "engine": _engine(),
        "processor": _processor(),
        "cores": f"{found.physical_cores} physical, {found.logical_cores} logical",
        "memory": f"{found.memory_bytes / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load before": ", ".join(f"{entry:.2f}" for entry in os.getloadavg()),
        "run": "quick: few rounds, no figure to rely on" if is_quick else "full",
    }
    return About(datetime.now(tz=UTC), rows)


def _commit() -> str:
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "commit unknown"
    return f"commit {done.stdout.strip()}"


def _engine() -> str:
    try:
        engine = load(None, cache_dir=directories().cache)
    except CorralError as error:
        return str(error)
    devices = ", ".join(device.description for device in engine.devices) or "no device"
    return f"llama-server {engine.build or engine.version}, {devices}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
