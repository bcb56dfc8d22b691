"""Tasks of Slurm: the output of squeue, how many the demand needs, and the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.cli import slurm as commands
from supervisor.errors import AccessDenied, ServiceFailed
from supervisor.service import slurm
from supervisor.service.slurm import Bounds, Demand, Task, Trend, parse_tasks, surplus, tasks_wanted

ROWS = """\
12_0|RUNNING|node1|3:20:01|None
12_1|PENDING||1-00:00:00|Resources
12_2|COMPLETING|node2|10:00|None
13|RUNNING|node3|5:00|None
slurm_load_jobs error: not a row
"""
IDLE = Demand(waiting=0, busy=0, slots=16, machines=4)
SHORT = Demand(waiting=5, busy=16, slots=16, machines=4)
BOUNDS = Bounds(least=1, most=8, grow_after_s=30, shrink_after_s=600)


def task(name: str, state: str = "RUNNING") -> Task:
    return Task(name, state, "node1", "1:00", "None")


def test_rows_of_squeue_are_parsed() -> None:
    tasks = parse_tasks(ROWS)
    assert [found.id for found in tasks] == ["12_0", "12_1", "13"]
    assert tasks[1] == Task("12_1", "PENDING", "", "1-00:00:00", "Resources")


def test_pending_tasks_end_first_and_then_the_latest() -> None:
    tasks = [task("1_0"), task("1_1", "PENDING"), task("2_0")]
    assert [found.id for found in surplus(tasks, 2)] == ["1_1"]
    assert [found.id for found in surplus(tasks, 1)] == ["2_0", "1_1"]
    assert surplus(tasks, 3) == ()


def wanted(demand: Demand, seconds: float, *, tasks: int = 4) -> int:
    """Return the tasks wanted after the same demand for some seconds."""
    trend = Trend().after(demand, 0).after(demand, seconds)
    return tasks_wanted(tasks, demand, trend, seconds, BOUNDS)


@pytest.mark.parametrize(
    ("demand", "seconds", "tasks"),
    [
        (SHORT, 29, 4),
        (SHORT, 30, 6),  # five requests need two machines of four slots
        (Demand(waiting=100, busy=16, slots=16, machines=4), 30, 8),  # the most
        (IDLE, 599, 4),
        (IDLE, 600, 3),  # one at a time
        (Demand(waiting=0, busy=8, slots=16, machines=4), 9999, 3),
        (Demand(waiting=0, busy=9, slots=16, machines=4), 9999, 4),  # the rest would be too full
        (Demand(waiting=0, busy=0, slots=4, machines=1), 9999, 4),  # three begin
        (Demand(waiting=1, busy=0, slots=0, machines=0), 30, 4),
    ],
)
def test_tasks_follow_the_demand(demand: Demand, seconds: float, tasks: int) -> None:
    assert wanted(demand, seconds) == tasks


def test_tasks_that_do_not_serve_yet_count() -> None:
    assert wanted(SHORT, 30, tasks=6) == 6
    assert wanted(SHORT, 30, tasks=5) == 6


def test_a_demand_that_ends_starts_the_time_anew() -> None:
    trend = Trend().after(SHORT, 0).after(IDLE, 20).after(SHORT, 25)
    assert (trend.short_since_s, trend.spare_since_s, trend.idle_since_s) == (25, None, None)
    assert tasks_wanted(4, SHORT, trend, 50, BOUNDS) == 4


TO_ZERO = replace(BOUNDS, least=0)
NONE = Demand(waiting=0, busy=0, slots=0, machines=0)
FIRST = replace(NONE, waiting=1)


def answered(count: int, *, busy: int = 0) -> Demand:
    return Demand(waiting=0, busy=busy, slots=16, machines=4, received_bytes=1000 * count)


@pytest.mark.parametrize(
    ("bounds", "looks", "tasks"),
    [
        (TO_ZERO, {0: answered(1), 599: answered(1)}, 4),
        (TO_ZERO, {0: answered(1), 600: answered(1)}, 0),  # all together
        (BOUNDS, {0: answered(1), 600: answered(1)}, 3),
        # A request between two looks, which none of them sees.
        (TO_ZERO, {0: answered(1), 300: answered(2), 599: answered(2)}, 4),
        (TO_ZERO, {0: answered(1), 300: answered(2), 600: answered(2)}, 3),
        (TO_ZERO, {0: answered(1), 300: answered(1, busy=1), 600: answered(1, busy=1)}, 3),
        (TO_ZERO, {0: answered(1), 300: FIRST, 310: answered(1)}, 4),
    ],
)
def test_all_tasks_end_when_no_request_has_come_for_long(
    bounds: Bounds, looks: dict[float, Demand], tasks: int
) -> None:
    trend = Trend()
    for at_s, demand in looks.items():
        trend = trend.after(demand, at_s)
    assert tasks_wanted(4, demand, trend, at_s, bounds) == tasks


def test_tasks_that_nobody_needs_any_more_end_before_they_serve() -> None:
    trend = Trend().after(NONE, 0).after(NONE, 600)
    assert tasks_wanted(2, NONE, trend, 600, TO_ZERO) == 0


def test_the_first_request_starts_a_task_at_once() -> None:
    trend = Trend().after(NONE, 0)
    assert tasks_wanted(0, NONE, trend, 0, TO_ZERO) == 0
    assert tasks_wanted(0, FIRST, trend.after(FIRST, 10), 10, TO_ZERO) == 1
    many = replace(FIRST, waiting=50)
    assert tasks_wanted(0, many, trend.after(many, 10), 10, TO_ZERO) == 1


def test_one_task_begins_however_long_the_first_request_waits() -> None:
    trend = Trend().after_change(10, grows=True).after(FIRST, 20).after(FIRST, 900)
    assert tasks_wanted(1, FIRST, trend, 900, TO_ZERO) == 1


def test_a_task_that_fails_at_once_is_started_again_after_a_while() -> None:
    trend = Trend().after_change(10, grows=True).after(FIRST, 20)
    assert tasks_wanted(0, FIRST, trend, 20, TO_ZERO) == 0
    assert tasks_wanted(0, FIRST, trend.after(FIRST, 40), 40, TO_ZERO) == 1
    ended = trend.after_change(5000, grows=False).after(FIRST, 5010)
    assert tasks_wanted(0, FIRST, ended, 5010, TO_ZERO) == 1


def test_bounds_hold_whatever_the_demand() -> None:
    bounds = replace(BOUNDS, least=2)
    assert tasks_wanted(1, IDLE, Trend(), 0, bounds) == 2
    assert tasks_wanted(9, SHORT, Trend(), 0, bounds) == 8


PROGRAMS = {
    "squeue": '/bin/cat "$SLURM_LOG/rows"',
    "sbatch": '/bin/cat > "$SLURM_LOG/script"; echo "sbatch $*" >> "$SLURM_LOG/log"; echo "14;c"',
    "scancel": 'echo "scancel $*" >> "$SLURM_LOG/log"',
    "scontrol": 'case $1 in write) echo "#!/bin/bash";; '
    '*) echo "JobId=12 Name=x WorkDir=/shared/jobs StdErr=/x";; esac',
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that note how they are called."""
    for name, line in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "rows").write_text(ROWS, "utf-8")
    (tmp_path / "log").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_LOG", str(tmp_path))
    return tmp_path


def calls(cluster: Path) -> list[str]:
    return (cluster / "log").read_text("utf-8").splitlines()


def test_more_tasks_have_the_script_and_the_directory_of_those_that_run(cluster: Path) -> None:
    result = commands.scale("large", 5)
    assert result.text == "2 more tasks submitted as job 14"
    words = "--parsable --job-name=large --array=0-1 --chdir=/shared/jobs"
    assert calls(cluster) == [f"sbatch {words}"]
    assert (cluster / "script").read_text("utf-8") == "#!/bin/bash\n"


def test_running_tasks_drain_and_pending_ones_are_cancelled(cluster: Path) -> None:
    assert commands.scale("large", 1).text == "1 tasks remain; ending: 13, 12_1"
    assert calls(cluster) == ["scancel 12_1", "scancel --batch --signal=USR2 13"]


def test_cancel_now_waits_for_no_request(cluster: Path) -> None:
    assert commands.cancel("large", now=True).data == {"tasks": ["12_0", "12_1", "13"]}
    assert calls(cluster) == ["scancel 12_0 12_1 13"]


def test_without_tasks_there_is_no_script_to_use(cluster: Path) -> None:
    (cluster / "rows").write_text("", "utf-8")
    assert commands.status("large").text == "no tasks are named large"
    with pytest.raises(ServiceFailed) as caught:
        commands.scale("large", 2)
    assert caught.value.hint == "corral slurm submit SCRIPT --tasks 2"


def test_a_given_script_is_that_of_new_tasks(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "corral.sbatch"
    script.write_text("#!/bin/sh\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    for rows, array in ((ROWS, "0-0"), ("", "0-3")):
        (cluster / "rows").write_text(rows, "utf-8")
        commands.scale("large", 4, script)
        words = f"--parsable --job-name=large --array={array} --chdir={tmp_path}"
        assert calls(cluster)[-1] == f"sbatch {words}"
        assert (cluster / "script").read_text("utf-8") == "#!/bin/sh\n"
    with pytest.raises(AccessDenied, match="cannot read"):
        commands.scale("large", 4, tmp_path / "missing")


def test_a_machine_without_slurm_says_so(cluster: Path) -> None:
    (cluster / "squeue").unlink()
    with pytest.raises(ServiceFailed, match="there is no program squeue"):
        slurm.list_tasks("large")
    (cluster / "squeue").write_text("#!/bin/sh\necho no controller >&2; exit 1\n", "utf-8")
    (cluster / "squeue").chmod(0o700)
    with pytest.raises(ServiceFailed, match="squeue failed: no controller"):
        slurm.list_tasks("large")
