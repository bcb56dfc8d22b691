"""Job arrays of Slurm whose tasks are daemons: its commands, and how many tasks the demand needs.

Slurm has all the state: the tasks are those of the user's jobs with one name.

Source: sbatch(1), squeue(1), scancel(1), scontrol(1), of Slurm 22.05.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import ServiceFailed

_TIMEOUT_S: Final = 60
# Task, state, node, time left, reason.
_FORMAT: Final = "%i|%T|%N|%L|%r"
_COLUMNS: Final = 5
# The job script handles it: the daemon drains, and the task ends.
_DRAIN: Final = "USR2"


@dataclass(frozen=True, slots=True)
class Task:
    id: str  # JOB_INDEX, or JOB without an array.
    state: str  # Slurm's, such as RUNNING.
    node: str  # Empty before it runs.
    time_left: str
    reason: str  # Why it is pending, or None.


def parse_tasks(text: str) -> tuple[Task, ...]:
    """Parse the output of squeue; tasks that already end are left out."""
    rows = [line.split("|", _COLUMNS - 1) for line in text.splitlines()]
    tasks = (Task(*row) for row in rows if len(row) == _COLUMNS)
    return tuple(task for task in tasks if task.state != "COMPLETING")


def _run(*argv: str, stdin: str | None = None) -> str:
    """Run a command of Slurm; raises ServiceFailed."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ServiceFailed(
            f"there is no program {argv[0]}", hint="run this on a login node of Slurm"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServiceFailed(f"{argv[0]} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise ServiceFailed(f"{argv[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def list_tasks(name: str) -> tuple[Task, ...]:
    return parse_tasks(
        _run("squeue", "--me", "--array", "--noheader", f"--name={name}", f"--format={_FORMAT}")
    )


def submit(name: str, script: str, tasks: int, directory: Path) -> str:
    """Submit an array of tasks, to run in a directory; return the job's number."""
    words = ("--parsable", f"--job-name={name}", f"--array=0-{tasks - 1}", f"--chdir={directory}")
    return _run("sbatch", *words, stdin=script).strip().partition(";")[0]


def script_of(task: Task) -> tuple[str, Path]:
    """Return the job script of a task, and its directory."""
    facts = _run("scontrol", "--oneliner", "show", "job", task.id)
    directory = facts.partition(" WorkDir=")[2].partition(" ")[0]
    return _run("scontrol", "write", "batch_script", task.id, "-"), Path(directory)


def end(tasks: Collection[Task], *, now: bool = False) -> None:
    """Let running tasks drain, and cancel the others; `now` cancels all."""
    running = [task.id for task in tasks if task.state == "RUNNING" and not now]
    others = [task.id for task in tasks if task.id not in running]
    if others:
        _run("scancel", *others)
    if running:
        _run("scancel", "--batch", f"--signal={_DRAIN}", *running)


def surplus(tasks: Sequence[Task], wanted: int) -> tuple[Task, ...]:
    """Return the tasks to end: pending ones first, then those that were submitted last."""
    by_value = sorted(tasks, key=lambda task: task.state != "RUNNING")
    return tuple(by_value[wanted:])


# The largest share of slots in use after a task has ended.
_FULL: Final = 0.7


@dataclass(frozen=True, slots=True)
class Demand:
    """What the front sees at one moment; `machines` are those that serve, with `slots` together."""

    waiting: int  # Queued requests.
    busy: int  # Slots in use.
    slots: int
    machines: int
    received_bytes: int = 0  # Of all their responses, which shows those between two looks.

    @property
    def needed(self) -> int:
        """How many machines the waiting requests need beside those that serve."""
        return math.ceil(self.waiting * self.machines / max(1, self.slots))

    @property
    def has_spare(self) -> bool:
        """Whether one machine less has room for all requests."""
        left = self.slots * (self.machines - 1) / max(1, self.machines)
        return self.waiting == 0 and self.machines > 1 and self.busy <= _FULL * left


@dataclass(frozen=True, slots=True)
class Trend:
    """Since when requests wait, a machine is spare, or no request comes; None: not now."""

    short_since_s: float | None = None
    spare_since_s: float | None = None
    idle_since_s: float | None = None
    received_bytes: int | None = None  # At the last look.
    grown_at_s: float | None = None  # When tasks were last submitted.

    def after(self, demand: Demand, at_s: float) -> Trend:
        """Return the trend with one more look."""
        short = at_s if self.short_since_s is None else self.short_since_s
        spare = at_s if self.spare_since_s is None else self.spare_since_s
        idle = at_s if self.idle_since_s is None else self.idle_since_s
        has_answered = self.received_bytes not in {None, demand.received_bytes}
        return Trend(
            short if demand.waiting else None,
            spare if demand.has_spare else None,
            None if demand.waiting or demand.busy or has_answered else idle,
            demand.received_bytes,
            self.grown_at_s,
        )

    def after_change(self, at_s: float, *, grows: bool) -> Trend:
        """Return the trend with which the looks at another number of tasks begin."""
        return Trend(grown_at_s=at_s if grows else self.grown_at_s)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the largest number of tasks, and how long a demand lasts before it changes.

    If `least` is 0, all tasks end together, and a request that waits starts the first one at once.
    """

    least: int
    most: int
    grow_after_s: float
    shrink_after_s: float


def tasks_wanted(tasks: int, demand: Demand, trend: Trend, at_s: float, bounds: Bounds) -> int:
    """Return how many tasks to run; tasks that do not serve yet count as relief under way."""
    wanted = tasks

    def has_lasted(since_s: float | None, seconds: float) -> bool:
        return since_s is not None and at_s - since_s >= seconds

    if tasks == demand.machines == 0 and demand.waiting:
        # A task that fails at once is not submitted again and again.
        if trend.grown_at_s is None or has_lasted(trend.grown_at_s, bounds.grow_after_s):
            wanted = 1
    elif has_lasted(trend.short_since_s, bounds.grow_after_s):
        wanted = max(tasks, demand.machines + demand.needed)
    elif bounds.least == 0 and has_lasted(trend.idle_since_s, bounds.shrink_after_s):
        wanted = 0
    elif has_lasted(trend.spare_since_s, bounds.shrink_after_s):
        wanted = tasks - 1
    return min(max(wanted, bounds.least), bounds.most)
