import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.host_files import HostFiles

from supervisor.system.machine import allowed_cpus
from supervisor.system.processor_load import ProcessorReading, processor_load, read_processor

TICKS = os.sysconf("SC_CLK_TCK")
START = ProcessorReading(100, 50, 10, 5, {7: 20}, is_low_priority=False)
CPUS = frozenset({0, 1})


def after(**changes: object) -> ProcessorReading:
    """10 s later."""
    return replace(START, at_s=110, **changes)  # type: ignore[arg-type]


def test_the_busy_time_without_our_processes_is_that_of_other_programs() -> None:
    load = processor_load(START, after(busy_s=70, own_s={7: 26}))
    assert load.others_cores == pytest.approx(1.4)
    assert load.own_cores == {7: pytest.approx(0.6)}
    assert load.span_s == 10


def test_sampled_time_below_our_own_is_none() -> None:
    assert processor_load(START, after(busy_s=69.9, own_s={7: 40})).others_cores == 0


def test_programs_of_low_priority_count_only_while_ours_are_busy() -> None:
    assert processor_load(START, after(nice_s=20)).others_cores == 0
    busy = after(busy_s=60, nice_s=12, own_s={7: 30})
    assert processor_load(START, busy).others_cores == pytest.approx(0.2)


def test_programs_of_low_priority_count_if_we_are_one() -> None:
    load = processor_load(START, after(nice_s=20, is_low_priority=True))
    assert load.others_cores == pytest.approx(1)


def test_a_new_process_took_all_its_time_since() -> None:
    load = processor_load(START, after(busy_s=70, own_s={7: 20, 8: 5}))
    assert load.others_cores == pytest.approx(1.5)


def test_a_pid_in_use_again_counts_from_zero() -> None:
    assert processor_load(START, after(own_s={7: 3})).own_cores == {7: pytest.approx(0.3)}


def test_a_process_that_ended_leaves_the_figure_unknown() -> None:
    assert processor_load(START, after(busy_s=70, own_s={})).others_cores is None


def test_missing_counters_are_unknown() -> None:
    load = processor_load(START, after(busy_s=None, stalled_s=None))
    assert (load.others_cores, load.pressure) == (None, None)
    assert processor_load(START, START).others_cores is None


def test_pressure_is_a_share_of_the_time() -> None:
    assert processor_load(START, after(stalled_s=7.5)).pressure == pytest.approx(0.25)


# Files


def stat(host: HostFiles, *lines: str) -> None:
    host.write("proc/stat", "\n".join(["cpu  1 1 1 1 1 1 1 1 0 0", *lines, "intr 5 0"]))


def test_time_is_that_of_our_cpus_with_interrupts_and_stolen_time(host: HostFiles) -> None:
    unit = TICKS
    stat(
        host,
        f"cpu0 {unit} {4 * unit} {unit} 900 900 {unit} {unit} {unit} 5 5",
        f"cpu1 {unit} 0 0 0 0 0 0 0 0 0",
        f"cpu2 {9 * unit} 0 0 0 0 0 0 0 0 0",
    )
    found = read_processor(host.root, CPUS, [])
    assert (found.busy_s, found.nice_s) == (6, 4)


def test_a_process_may_have_any_name(host: HostFiles) -> None:
    fields = " ".join(["0"] * 10)
    host.write("proc/7/stat", f"7 (a) b (c) S {fields} {3 * TICKS} {2 * TICKS} 0 0")
    assert read_processor(host.root, CPUS, [7, 8]).own_s == {7: 5}


def test_the_pressure_of_the_own_group_comes_first(host: HostFiles) -> None:
    line = "some avg10=1.00 avg60=1.00 avg300=1.00 total="
    host.write("proc/pressure/cpu", f"{line}2000000\nfull avg10=0.00 total=1")
    assert read_processor(host.root, CPUS, []).stalled_s == 2
    host.group("/a")
    host.limit("/a", "cpu.pressure", f"{line}3000000")
    assert read_processor(host.root, CPUS, []).stalled_s == 3


@pytest.mark.parametrize("text", ["", "cpu0 1 2 3", "nothing"])
def test_without_counters_nothing_is_known(host: HostFiles, text: str) -> None:
    stat(host, *filter(None, [text]))
    found = read_processor(host.root, CPUS, [1])
    assert (found.busy_s, found.stalled_s, found.own_s) == (None, None, {})


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_this_machine_shows_the_time_of_a_process() -> None:
    root, allowed = Path("/"), allowed_cpus()
    command = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as busy:
        before = read_processor(root, allowed, [busy.pid])
        while (found := read_processor(root, allowed, [busy.pid])).own_s[busy.pid] < 0.25:
            pass
        load = processor_load(before, found)
        busy.communicate(b"\n")
    assert load.own_cores[busy.pid] > 0
    assert load.others_cores is not None
    assert load.pressure is None or 0 <= load.pressure <= 1
