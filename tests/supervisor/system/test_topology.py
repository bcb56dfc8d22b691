from support.host_files import HostFiles

from supervisor.system.machine import Machine, parse_cpu_list, read_from, read_topology


def cpus(line: str) -> frozenset[int]:
    return parse_cpu_list(line)


def machine(host: HostFiles, allowed: str, **environ: str) -> Machine:
    return read_from(host.root, cpus(allowed), environ)


def test_lists_of_cpus_are_parsed() -> None:
    assert cpus("0-2,8") == {0, 1, 2, 8}
    assert cpus("") == cpus("nonsense") == cpus("1-x") == frozenset()


def hyper_threaded(host: HostFiles, *, name: str = "core_cpus_list") -> None:
    """Four cores with two threads each; siblings are four numbers apart."""
    host.cores([f"{core},{core + 4}" for core in range(4)], name=name)


def test_hyper_threads_of_a_core_count_once(host: HostFiles) -> None:
    hyper_threaded(host)
    found = machine(host, "0-7")
    assert (found.physical_cores, found.logical_cores, found.performance_cores) == (4, 8, 4)


def test_older_kernels_name_the_siblings_otherwise(host: HostFiles) -> None:
    hyper_threaded(host, name="thread_siblings_list")
    assert machine(host, "0-7").physical_cores == 4


def test_a_cpuset_with_one_thread_of_each_core_has_all_cores(host: HostFiles) -> None:
    hyper_threaded(host)
    found = machine(host, "4-7")
    assert (found.physical_cores, found.logical_cores) == (4, 4)


def test_a_cpuset_with_both_threads_of_two_cores_has_two(host: HostFiles) -> None:
    hyper_threaded(host)
    assert machine(host, "0,1,4,5").physical_cores == 2


def hybrid(host: HostFiles) -> None:
    """Two performance cores with two threads each, four efficiency cores, two of low power."""
    host.cores(["0-1", "2-3", "4", "5", "6", "7", "8", "9"])
    host.write("sys/devices/cpu_core/cpus", "0-3")
    host.write("sys/devices/cpu_atom/cpus", "4-7")
    host.write("sys/devices/cpu_lowpower/cpus", "8-9")


def test_efficiency_cores_of_intel_are_no_performance_cores(host: HostFiles) -> None:
    hybrid(host)
    assert read_topology(host.root, cpus("0-9")) == (2, 6, 1)
    found = machine(host, "0-9")
    assert (found.physical_cores, found.performance_cores, found.decode_cores) == (8, 2, 2)


def test_efficiency_cores_decode_where_the_cpuset_has_no_others(host: HostFiles) -> None:
    hybrid(host)
    found = machine(host, "4-7")
    assert (found.performance_cores, found.efficiency_cores, found.decode_cores) == (0, 4, 4)
    assert found.decode_core_kind == "efficiency core"


def test_little_cores_of_arm_are_no_performance_cores(host: HostFiles) -> None:
    host.cores([str(cpu) for cpu in range(8)])
    host.capacities({**dict.fromkeys(range(4), 250), 4: 620, 5: 620, 6: 620, 7: 1024})
    assert read_topology(host.root, cpus("0-7")) == (4, 4, 1)
    assert read_topology(host.root, cpus("0-3")) == (0, 4, 1)


def test_equal_capacities_are_all_performance_cores(host: HostFiles) -> None:
    host.cores("0123")
    host.capacities(dict.fromkeys(range(4), 1024))
    assert read_topology(host.root, cpus("0-3")) == (4, 0, 1)


def test_numa_nodes_count_if_all_their_cpus_may_be_used(host: HostFiles) -> None:
    host.cores([str(cpu) for cpu in range(8)])
    host.numa_nodes("0-3", "4-7", "")  # the third has memory only
    assert machine(host, "0-7").numa_nodes == 2
    assert machine(host, "4-7").numa_nodes == 1
    assert machine(host, "0-6").numa_nodes == 1


def test_without_any_file_each_cpu_is_a_core(host: HostFiles) -> None:
    found = machine(host, "0-3")
    assert (found.physical_cores, found.performance_cores, found.numa_nodes) == (4, 4, 1)


def test_a_quota_limits_cores_and_not_threads_of_cores(host: HostFiles) -> None:
    hyper_threaded(host)
    host.group("/")
    host.limit("", "cpu.max", "300000 100000")
    found = machine(host, "0-7")
    assert (found.physical_cores, found.logical_cores, found.quota_spare_cores) == (3, 3, 1)


def test_a_quota_leaves_performance_cores_first(host: HostFiles) -> None:
    hybrid(host)
    host.group("/")
    host.limit("", "cpu.max", "300000 100000")
    found = machine(host, "0-9")
    assert (found.performance_cores, found.efficiency_cores, found.quota_spare_cores) == (2, 1, 5)


def test_a_quota_of_part_of_a_cpu_is_one_core(host: HostFiles) -> None:
    hyper_threaded(host)
    host.group("/")
    host.limit("", "cpu.max", "50000 100000")
    assert machine(host, "0-7").physical_cores == 1


def test_a_task_of_slurm_has_the_cores_and_the_memory_of_its_allocation(host: HostFiles) -> None:
    hyper_threaded(host)
    task = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}
    found = machine(host, "0-7", SLURM_CPUS_ON_NODE="2", SLURM_MEM_PER_NODE="64", **task)
    assert (found.physical_cores, found.quota_spare_cores) == (2, 2)
    assert found.memory_bytes == found.memory_available_bytes == 64 * 1024**2
    host.group("/")
    host.limit("", "cpu.max", "100000 100000")
    assert machine(host, "0-7", SLURM_CPUS_ON_NODE="2", **task).physical_cores == 1
