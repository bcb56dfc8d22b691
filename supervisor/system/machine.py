"""Reads the resources of this machine that the daemon may use: cores, NUMA nodes, memory.

Hyper-threads count as one core, and efficiency cores are told apart from performance cores.

Sources: Linux, Documentation/admin-guide/cputopology.rst (core_cpus_list, before 5.3
thread_siblings_list); arch/x86/events/intel/core.c (the PMUs cpu_core, cpu_atom and cpu_lowpower of
hybrid processors); drivers/base/arch_topology.c (cpu_capacity, at most 1024, of ARM and RISC-V);
admin-guide/mm/numaperf.rst (node*/cpulist).
"""

from __future__ import annotations

import functools
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from supervisor.system.limits import (
    cpu_quota,
    has_limit,
    kernel_text,
    limit,
    memory_limit_bytes,
    slurm_limits,
)

_CPUINFO: Final = Path("/proc/cpuinfo")
_NAME_MAX: Final = 80


@functools.cache
def cpu_name() -> str:
    """Return the processor's name as Linux reports it, or its architecture."""
    name = " ".join(_field(_CPUINFO, "model name").split())
    return (name or platform.machine() or "unknown processor")[:_NAME_MAX]


_CPUS: Final = "sys/devices/system/cpu"
_NODES: Final = "sys/devices/system/node"
# A core of less than half the largest capacity is an efficiency core. Capacities in device trees,
# scaled by frequency: Cortex-A55 250 to 410 beside A76 to X1 at 1024, middle cores from 620 up.
_PERFORMANCE_SHARE: Final = 0.5

Core = frozenset[int]  # the CPUs of one physical core


# On a large machine these are hundreds of files. A CPU that goes offline changes the affinity.
@lru_cache(maxsize=8)
def read_topology(root: Path, allowed: frozenset[int]) -> tuple[int, int, int]:
    """Return the performance cores, the efficiency cores and the NUMA nodes of the `allowed` CPUs.

    A CPU without readable files below `root` counts as a performance core. There is 1 NUMA node
    unless the CPUs are all CPUs of all nodes.
    """
    slow = _efficiency_cpus(root, allowed)
    cores = {_core(root, cpu) & allowed for cpu in allowed}
    efficiency = sum(1 for core in cores if core <= slow)
    files = (root / _NODES).glob("node[0-9]*/cpulist")
    nodes = [cpus for file in files if (cpus := parse_cpu_list(kernel_text(file)))]
    numa_nodes = max(1, len(nodes)) if all(cpus <= allowed for cpus in nodes) else 1
    return len(cores) - efficiency, efficiency, numa_nodes


def parse_cpu_list(line: str) -> frozenset[int]:
    """Parse `0-3,8`; empty if it is malformed."""
    parts = [part.partition("-") for part in line.split(",") if part]
    try:
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    except ValueError:
        return frozenset()
    return frozenset(cpu for cpus in ranges for cpu in cpus)


def _core(root: Path, cpu: int) -> Core:
    topology = root / _CPUS / f"cpu{cpu}" / "topology"
    lists = (kernel_text(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
    return next(filter(None, map(parse_cpu_list, lists)), frozenset()) | {cpu}


def _efficiency_cpus(root: Path, allowed: frozenset[int]) -> frozenset[int]:
    if fast := parse_cpu_list(kernel_text(root / "sys/devices/cpu_core/cpus")):
        return allowed - fast
    # Compared with all CPUs, because the affinity may contain only slow ones.
    files = (root / _CPUS).glob("cpu[0-9]*/cpu_capacity")
    found = {int(file.parent.name[3:]): kernel_text(file) for file in files}
    capacities = {cpu: int(value) for cpu, value in found.items() if value.isdecimal()}
    least = max(capacities.values(), default=0) * _PERFORMANCE_SHARE
    return frozenset(cpu for cpu in allowed if capacities.get(cpu, least) < least)


_ROOT: Final = Path("/")
# Bit numbers of the effective capabilities. Source: linux/capability.h.
_CAP_IPC_LOCK: Final = 14
_CAP_SYS_NICE: Final = 23
# --prio 2 requests a nice value of -10; the limit counts down from 20.
# Source: llama.cpp, set_process_priority; setrlimit(2), RLIMIT_NICE.
_NICE_LIMIT: Final = 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine; cores are within the affinity and the CPU quota."""

    physical_cores: int  # without hyper-threads
    logical_cores: int
    memory_bytes: int  # at most the control group's limit
    memory_available_bytes: int  # including caches that can be dropped
    memlock_bytes: int | None  # the limit of locked memory; None means unlimited
    may_renice: bool  # whether a process may raise its own priority to `high`
    cpu_flags: frozenset[str]  # by their Linux names; empty if unknown
    efficiency_cores: int = 0  # the slow ones among the physical cores
    quota_spare_cores: int = 0  # physical cores within the affinity, but beyond the CPU quota
    numa_nodes: int = 1  # 1 also if the affinity lacks any CPU of any node

    @property
    def performance_cores(self) -> int:
        """Physical cores that are not efficiency cores; 0 if all are efficiency cores."""
        return self.physical_cores - self.efficiency_cores

    @property
    def decode_cores(self) -> int:
        """Cores to decode on: no slow cores unless all are, as threads wait for the slowest."""
        return self.performance_cores or self.physical_cores

    @property
    def decode_core_kind(self) -> str:
        if not self.efficiency_cores:
            return "physical core"
        return "performance core" if self.performance_cores else "efficiency core"


_last: list[Machine] = []


def read() -> Machine:
    """Read the resources; if they cannot be read now, return the last ones.

    Raises OSError: they were never read, for example because no file descriptor is free.
    """
    try:
        found = read_from(_ROOT, allowed_cpus(), os.environ)
    except OSError:
        if not _last:
            raise
        return _last[0]
    _last[:] = [found]
    return found


def read_from(root: Path, allowed: frozenset[int], environ: Mapping[str, str]) -> Machine:
    """Read the resources with these CPUs, from a root that contains `proc` and `sys`.

    `environ` has the limits of a task of Slurm.
    """
    import psutil  # noqa: PLC0415 (takes 20 ms)

    memory = psutil.virtual_memory()
    cpus, slurm_bytes = slurm_limits(environ)
    limit_bytes = min(memory_limit_bytes(root) or memory.total, slurm_bytes or memory.total)
    # Rounded down: with a fraction of a CPU, a thread would be throttled.
    quota = max(1, int(min(cpu_quota(root) or math.inf, cpus or len(allowed))))
    if (root / "sys").is_dir():
        performance, efficiency, numa_nodes = read_topology(root, allowed)
    else:
        performance, efficiency, numa_nodes = psutil.cpu_count(logical=False) or len(allowed), 0, 1
    present = performance + efficiency
    physical = min(present, quota)
    return Machine(
        physical_cores=physical,
        logical_cores=min(len(allowed), quota),
        memory_bytes=min(memory.total, limit_bytes),
        memory_available_bytes=min(memory.available, limit_bytes),
        memlock_bytes=None if _has_capability(_CAP_IPC_LOCK) else limit("RLIMIT_MEMLOCK")[0],
        may_renice=_may_renice(),
        cpu_flags=cpu_flags(),
        efficiency_cores=max(0, physical - performance),
        quota_spare_cores=present - physical,
        numa_nodes=numa_nodes,
    )


# The state of the battery is read again after this time.
_BATTERY_S: Final = 30.0


def is_on_battery(at_s: float | None = None) -> bool:
    """Return whether the machine runs on its battery; False without one. Known for 30 s."""
    return _is_discharging((time.monotonic() if at_s is None else at_s) // _BATTERY_S)


@lru_cache(maxsize=1)
def _is_discharging(_period: float) -> bool:
    import psutil  # noqa: PLC0415 (takes 20 ms)

    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError):  # not on this system, or without sysfs
        return False
    return battery is not None and battery.power_plugged is False


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs of the affinity, which cpusets limit as well."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's features, such as `avx2`; empty if unknown."""
    return frozenset(_field(_CPUINFO, "flags").split())


def _field(file: Path, name: str) -> str:
    """Return the text after the first line's `name:` in a file of /proc; empty without one."""
    lines = (line for line in kernel_text(file).splitlines() if line.startswith(name))
    return next(lines, "").partition(":")[2].strip()


def _may_renice() -> bool:
    if not has_limit("RLIMIT_NICE"):
        return os.geteuid() == 0
    soft, _ = limit("RLIMIT_NICE")
    return soft is None or soft >= _NICE_LIMIT or _has_capability(_CAP_SYS_NICE)


def _has_capability(bit: int) -> bool:
    return bool(int(_field(Path("/proc/self/status"), "CapEff") or "0", 16) >> bit & 1)
