"""Implements `corral slurm`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from supervisor import errors
from supervisor.daemon.control_client import Client
from supervisor.output import CommandResult, table, warn, write
from supervisor.service import slurm
from supervisor.service.slurm import Bounds, Demand, Task, Trend
from supervisor.system.paths import directories

_HEAD: Final = ("task", "state", "node", "time left", "reason")
_LOOK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class JobScript:
    text: str
    directory: Path  # Of its tasks.


def read_script(path: Path) -> JobScript:
    with errors.access_denied(f"cannot read {path}"):
        return JobScript(path.read_text("utf-8"), Path.cwd())


def submit(script: Path, tasks: int, name: str) -> CommandResult:
    found = read_script(script)
    job = slurm.submit(name, found.text, tasks, found.directory)
    shown = f"submitted {tasks} tasks as job {job}; corral slurm status shows them"
    return CommandResult({"job": job, "tasks": tasks}, shown)


def status(name: str) -> CommandResult:
    tasks = slurm.list_tasks(name)
    rows = [
        (task.id, task.state, task.node or None, task.time_left, _reason(task)) for task in tasks
    ]
    text = table(_HEAD, rows) if tasks else f"no tasks are named {name}"
    return CommandResult([asdict(task) for task in tasks], text)


def _reason(task: Task) -> str | None:
    return None if task.reason == "None" else task.reason


def cancel(name: str, *, now: bool) -> CommandResult:
    tasks = slurm.list_tasks(name)
    slurm.end(tasks, now=now)
    how = "ended" if now else "end when their requests are answered"
    return CommandResult({"tasks": [task.id for task in tasks]}, f"{len(tasks)} tasks {how}")


def scale(name: str, wanted: int, script: Path | None = None) -> CommandResult:
    given = read_script(script) if script else None
    text = _scale(name, slurm.list_tasks(name), wanted, given)
    return CommandResult({"tasks": wanted}, text)


def scale_automatically(name: str, bounds: Bounds, script: Path | None = None) -> CommandResult:
    """Follow the demand of the running front until Ctrl-C."""
    given = read_script(script) if script else None
    front, trend = Client(directories().control_socket), Trend()
    while True:
        try:
            tasks, demand = slurm.list_tasks(name), _demand(front)
            trend = trend.after(demand, at_s := time.monotonic())
            wanted = slurm.tasks_wanted(len(tasks), demand, trend, at_s, bounds)
            if wanted != len(tasks):
                write(_scale(name, tasks, wanted, given))
                trend = trend.after_change(at_s, grows=wanted > len(tasks))
        except (errors.ServiceFailed, errors.NotRunning) as error:
            warn(error.message)  # Slurm and the front come back
        time.sleep(_LOOK_S)


def _demand(front: Client) -> Demand:
    up = [node for node in front.status().nodes if node.state == "up"]
    return Demand(
        # A request that takes no slot, and waits for a machine, is not in the queue.
        waiting=sum(request.phase in {"queued", "loading"} for request in front.requests()),
        busy=sum(node.slots_busy for node in up),
        slots=sum(node.slots for node in up),
        machines=len(up),
        received_bytes=sum(node.received_bytes or 0 for node in up),
    )


def _scale(name: str, tasks: tuple[Task, ...], wanted: int, given: JobScript | None) -> str:
    """Add or end tasks; return a sentence about it. Raises ServiceFailed.

    `given` is the script of new tasks; None: that of the tasks.
    """
    if wanted > len(tasks):
        if not (tasks or given):
            raise errors.ServiceFailed(
                f"no tasks are named {name}, whose script would be used",
                hint=f"corral slurm submit SCRIPT --tasks {wanted}",
            )
        script = given or JobScript(*slurm.script_of(tasks[0]))
        job = slurm.submit(name, script.text, wanted - len(tasks), script.directory)
        return f"{wanted - len(tasks)} more tasks submitted as job {job}"
    ended = slurm.surplus(tasks, wanted)
    slurm.end(ended)
    names = ", ".join(task.id for task in ended)
    return f"{len(tasks)} tasks remain" if not ended else f"{wanted} tasks remain; ending: {names}"
