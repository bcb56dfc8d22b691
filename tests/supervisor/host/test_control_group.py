import pytest
from host_files import HostFiles

from supervisor.host.control_group import cpu_quota, memory_limit_bytes, pressure_file

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


def test_nothing_readable_is_no_limit(host: HostFiles) -> None:
    assert cpu_quota(host.root) is None
    assert memory_limit_bytes(host.root) is None
    assert pressure_file(host.root) is None


def test_the_pressure_is_that_of_the_own_group(host: HostFiles) -> None:
    host.group("/a/b")
    host.limit("/a", "cpu.pressure", "some")
    host.limit("/a/b", "cpu.pressure", "some")
    assert pressure_file(host.root) == host.root / "sys/fs/cgroup/a/b/cpu.pressure"
