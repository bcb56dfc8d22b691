import pytest
from support.host_files import HostFiles

from supervisor.system.limits import (
    OomKillWatch,
    cpu_quota,
    memory_limit_bytes,
    oom_kills,
    pressure_file,
    slurm_limits,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("line", "quota"),
    [("150000 100000", 1.5), ("max 100000", None), ("nonsense", None), ("", None)],
)
def test_a_quota_is_in_cpus(host: HostFiles, line: str, quota: float | None) -> None:
    host.group("/")
    host.limit("", "cpu.max", line)
    assert cpu_quota(host.root) == quota


@pytest.mark.parametrize("lowest", ["/system.slice", "/system.slice/corral.service"])
def test_the_lowest_quota_of_all_levels_counts(host: HostFiles, lowest: str) -> None:
    host.group("/system.slice/corral.service")
    for path in ("/system.slice", "/system.slice/corral.service"):
        host.limit(path, "cpu.max", "200000 100000" if path == lowest else "800000 100000")
    host.limit("/user.slice", "cpu.max", "100000 100000")  # not ours
    assert cpu_quota(host.root) == 2


def test_the_lowest_memory_limit_of_all_levels_counts(host: HostFiles) -> None:
    host.group("/a/b")
    host.limit("/a", "memory.max", str(2 * GIB))
    host.limit("/a/b", "memory.max", "max")
    assert memory_limit_bytes(host.root) == 2 * GIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../other"])
def test_a_container_that_sees_only_its_own_group_finds_it(host: HostFiles, path: str) -> None:
    host.group(path)
    host.limit("", "cpu.max", "400000 100000")
    assert cpu_quota(host.root) == 4


def test_version_1_has_files_for_each_controller(host: HostFiles) -> None:
    host.write("proc/self/cgroup", "4:memory:/one\n1:cpu,cpuacct:/one\n0::/")
    host.limit("/cpu/one", "cpu.cfs_quota_us", "250000")
    host.limit("/cpu/one", "cpu.cfs_period_us", "100000")
    host.limit("/cpu", "cpu.cfs_quota_us", "-1")
    host.limit("/cpu", "cpu.cfs_period_us", "100000")
    host.limit("/memory/one", "memory.limit_in_bytes", str(GIB))
    assert cpu_quota(host.root) == 2.5
    assert memory_limit_bytes(host.root) == GIB


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "2048"}, (8, 2 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_CPU": "512"}, (4, 2 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "0"}, (4, None)),
        ({"SLURM_CPUS_ON_NODE": "72(x2)"}, (None, None)),
    ],
)
def test_a_task_of_slurm_has_the_limits_of_its_allocation(
    environ: dict[str, str], limits: tuple[int | None, int | None]
) -> None:
    assert slurm_limits({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", **environ}) == limits
    assert slurm_limits({"SLURM_JOB_ID": "7", **environ}) == (None, None)


def test_nothing_readable_is_no_limit(host: HostFiles) -> None:
    assert cpu_quota(host.root) is None
    assert memory_limit_bytes(host.root) is None
    assert pressure_file(host.root) is None


def test_the_pressure_is_that_of_the_own_group(host: HostFiles) -> None:
    host.group("/a/b")
    host.limit("/a", "cpu.pressure", "some")
    host.limit("/a/b", "cpu.pressure", "some")
    assert pressure_file(host.root) == host.root / "sys/fs/cgroup/a/b/cpu.pressure"


def test_kills_for_want_of_memory_are_those_of_the_own_group_else_of_the_machine(
    host: HostFiles,
) -> None:
    assert oom_kills(host.root) is None
    host.write("proc/vmstat", "nr_free_pages 9\noom_kill 7\n")
    assert oom_kills(host.root) == 7
    host.write("proc/self/cgroup", "4:memory:/one\n0::/a/b")
    host.limit("/memory/one", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert oom_kills(host.root) == 3
    host.write("proc/self/cgroup", "0::/a/b")
    host.limit("/a", "memory.events", "oom 9\noom_kill 9")
    host.limit("/a/b", "memory.events", "low 0\noom 2\noom_kill 2\noom_group_kill 0")
    assert oom_kills(host.root) == 2


def test_a_kill_counts_for_all_that_end_within_two_seconds(host: HostFiles) -> None:
    now_s = 100.0
    host.write("proc/vmstat", "oom_kill 1")
    watch = OomKillWatch(host.root, lambda: now_s)
    assert not watch.has_killed()
    host.write("proc/vmstat", "oom_kill 2")
    assert watch.has_killed()
    now_s = 101.9
    assert watch.has_killed()
    now_s = 102.1
    assert not watch.has_killed()


def test_where_no_kills_are_counted_none_is_known(host: HostFiles) -> None:
    assert not OomKillWatch(host.root).has_killed()
