"""The resources of this machine that the daemon may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from supervisor.host.control_group import cpu_quota, memory_limit_bytes
from supervisor.host.limits import has_limit, limit
from supervisor.host.topology import Topology, read_topology

_ROOT: Final = Path("/")
_CPUINFO: Final = Path("/proc/cpuinfo")
_STATUS: Final = Path("/proc/self/status")
# Bit numbers of the effective capabilities. Source: linux/capability.h.
_CAP_IPC_LOCK: Final = 14
_CAP_SYS_NICE: Final = 23
# --prio 2 requests a nice value of -10; the limit counts down from 20.
# Source: llama.cpp, set_process_priority; setrlimit(2), RLIMIT_NICE.
_NICE_LIMIT: Final = 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine."""

    physical_cores: int  # without hyper-threads; within the affinity and the CPU quota
    logical_cores: int  # within the same
    memory_bytes: int  # or the control group's limit if lower
    memory_available_bytes: int  # including caches that can be dropped
    memlock_bytes: int | None  # the limit of locked memory
    may_renice: bool  # whether a process may raise its own priority to `high`
    cpu_flags: frozenset[str]  # as Linux names them; empty if unknown
    efficiency_cores: int = 0  # those of the physical cores that are slow
    quota_spare_cores: int = 0  # physical cores within the affinity, but beyond the CPU quota
    numa_nodes: int = 1  # 1 also if the affinity has not all CPUs of all nodes

    @property
    def performance_cores(self) -> int:
        """Physical cores that are not efficiency cores; 0 if there are only those."""
        return self.physical_cores - self.efficiency_cores

    @property
    def decode_cores(self) -> int:
        """Cores to decode on: threads wait for the slowest, so slow cores only if all are slow."""
        return self.performance_cores or self.physical_cores

    @property
    def decode_core_kind(self) -> str:
        """What those cores are called."""
        if not self.efficiency_cores:
            return "physical core"
        return "performance core" if self.performance_cores else "efficiency core"


_last: list[Machine] = []


def read() -> Machine:
    """Read the resources, or return the last ones if they cannot be read now.

    Raises:
        OSError: They could never be read, for example because no descriptor is free.
    """
    try:
        found = read_from(_ROOT, allowed_cpus())
    except OSError:
        if not _last:
            raise
        return _last[0]
    _last[:] = [found]
    return found


def read_from(root: Path, allowed: frozenset[int]) -> Machine:
    """Read the resources with these CPUs, from a root that contains `proc` and `sys`."""
    import psutil  # noqa: PLC0415 (takes 20 ms)

    memory = psutil.virtual_memory()
    limit = memory_limit_bytes(root) or memory.total
    quota = max(1, int(cpu_quota(root) or len(allowed)))  # part of a CPU would throttle a thread
    found = _topology(root, allowed)
    present = found.performance_cores + found.efficiency_cores
    physical = min(present, quota)
    return Machine(
        physical_cores=physical,
        logical_cores=min(len(allowed), quota),
        memory_bytes=min(memory.total, limit),
        memory_available_bytes=min(memory.available, limit),
        memlock_bytes=_memlock_bytes(),
        may_renice=_may_renice(),
        cpu_flags=cpu_flags(),
        efficiency_cores=max(0, physical - found.performance_cores),
        quota_spare_cores=present - physical,
        numa_nodes=found.numa_nodes,
    )


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs of the affinity, which cpusets limit too."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _topology(root: Path, allowed: frozenset[int]) -> Topology:
    if (root / "sys").is_dir():
        return read_topology(root, allowed)
    import psutil  # noqa: PLC0415 (takes 20 ms)

    return Topology(psutil.cpu_count(logical=False) or len(allowed), 0, 1)


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU's features, such as `avx2`; empty if unknown."""
    for line in _text(_CPUINFO).splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _memlock_bytes() -> int | None:
    return None if _has_capability(_CAP_IPC_LOCK) else limit("RLIMIT_MEMLOCK").soft


def _may_renice() -> bool:
    if not has_limit("RLIMIT_NICE"):
        return os.geteuid() == 0
    soft, _ = limit("RLIMIT_NICE")
    return soft is None or soft >= _NICE_LIMIT or _has_capability(_CAP_SYS_NICE)


def _has_capability(bit: int) -> bool:
    for line in _text(_STATUS).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
