from samples import machine

from supervisor.doctor.checks import describe_cores


def test_an_ordinary_machine_has_cores_and_threads() -> None:
    assert describe_cores(machine()) == "8 cores, 16 threads"


def test_what_is_special_about_the_cores_is_named() -> None:
    here = machine(efficiency_cores=4, quota_spare_cores=2, numa_nodes=2)
    assert describe_cores(here) == (
        "8 cores (4 of them efficiency cores), 16 threads, 2 more cores beyond the CPU quota, "
        "2 NUMA nodes"
    )
