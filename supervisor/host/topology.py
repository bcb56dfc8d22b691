"""Which processor cores there are: hyper-threads, efficiency cores and NUMA nodes.

Sources: Linux, Documentation/admin-guide/cputopology.rst (core_cpus_list, before 5.3
thread_siblings_list); arch/x86/events/intel/core.c (the PMUs cpu_core, cpu_atom and cpu_lowpower of
hybrid processors); drivers/base/arch_topology.c (cpu_capacity, at most 1024, of ARM and RISC-V);
admin-guide/mm/numaperf.rst (node*/cpulist).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from supervisor.host.control_group import text

_CPUS: Final = "sys/devices/system/cpu"
_NODES: Final = "sys/devices/system/node"
_PERFORMANCE_PMU: Final = "sys/devices/cpu_core/cpus"
# A core of less than half the largest capacity is an efficiency core. Capacities in device trees,
# scaled by frequency: Cortex-A55 250 to 410 beside A76 to X1 at 1024, middle cores from 620 up.
_PERFORMANCE_SHARE: Final = 0.5

Core = frozenset[int]  # the CPUs of one physical core


@dataclass(frozen=True, slots=True)
class Topology:
    """The physical cores that the CPUs of an affinity belong to."""

    performance_cores: int
    efficiency_cores: int
    numa_nodes: int  # nodes with CPUs; 1 unless the affinity has all CPUs of all of them


# On a large machine these are hundreds of files. A CPU that goes offline changes the affinity.
@lru_cache(maxsize=8)
def read_topology(root: Path, allowed: frozenset[int]) -> Topology:
    """Read the cores of these CPUs. A CPU of which nothing can be read is a performance core.

    Args:
        root: Contains `sys`.
        allowed: The CPUs that the process may use.
    """
    slow = _efficiency_cpus(root, allowed)
    cores = {_core(root, cpu) & allowed for cpu in allowed}
    efficiency = sum(1 for core in cores if core <= slow)
    return Topology(len(cores) - efficiency, efficiency, _numa_nodes(root, allowed))


def parse_cpu_list(line: str) -> frozenset[int]:
    """Parse `0-3,8`; empty if it is malformed."""
    try:
        return frozenset(cpu for part in line.split(",") if part for cpu in _range(part))
    except ValueError:
        return frozenset()


def _range(part: str) -> Iterator[int]:
    first, _, last = part.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _core(root: Path, cpu: int) -> Core:
    topology = root / _CPUS / f"cpu{cpu}" / "topology"
    lists = (text(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
    return next(filter(None, map(parse_cpu_list, lists)), frozenset()) | {cpu}


def _efficiency_cpus(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    if fast := parse_cpu_list(text(root / _PERFORMANCE_PMU)):
        return allowed - fast
    # Compared with all CPUs, because the affinity may leave only slow ones.
    files = (root / _CPUS).glob("cpu[0-9]*/cpu_capacity")
    found = {int(file.parent.name[3:]): text(file) for file in files}
    capacities = {cpu: int(value) for cpu, value in found.items() if value.isdecimal()}
    least = max(capacities.values(), default=0) * _PERFORMANCE_SHARE
    return frozenset(cpu for cpu in allowed if capacities.get(cpu, least) < least)


def _numa_nodes(root: Path, allowed: frozenset[int]) -> int:
    files = (root / _NODES).glob("node[0-9]*/cpulist")
    nodes = [cpus for file in files if (cpus := parse_cpu_list(text(file)))]
    return max(1, len(nodes)) if all(cpus <= allowed for cpus in nodes) else 1
