"""The resources of this machine that the daemon may use."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_STATUS: Final = Path("/proc/self/status")
_CGROUP: Final = Path("/sys/fs/cgroup")
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


_last: list[Machine] = []


def read() -> Machine:
    """Read the resources, or return the last ones if they cannot be read now.

    Raises:
        OSError: They could never be read, for example because no descriptor is free.
    """
    try:
        found = _read()
    except OSError:
        if not _last:
            raise
        return _last[0]
    _last[:] = [found]
    return found


def _read() -> Machine:
    import psutil  # noqa: PLC0415 (takes 20 ms)

    memory = psutil.virtual_memory()
    limit = _cgroup_memory_bytes() or memory.total
    logical = _logical_cores()
    total = psutil.cpu_count(logical=True) or logical
    per_core = max(1, total // (psutil.cpu_count(logical=False) or total))
    return Machine(
        physical_cores=max(1, logical // per_core),
        logical_cores=logical,
        memory_bytes=min(memory.total, limit),
        memory_available_bytes=min(memory.available, limit),
        memlock_bytes=_memlock_bytes(),
        may_renice=_may_renice(),
        cpu_flags=cpu_flags(),
    )


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features, such as `avx2`; empty if unknown."""
    for line in _text(_CPUINFO).splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _logical_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(allowed or 1, _cgroup_cpus() or allowed or 1))


def _cgroup_cpus() -> int | None:
    """Return the CPU quota in whole cores, or None without one. Source: cgroup v2, cpu.max."""
    quota, _, period = _text(_CGROUP / "cpu.max").strip().partition(" ")
    return max(1, int(quota) // int(period)) if quota.isdecimal() and period.isdecimal() else None


def _cgroup_memory_bytes() -> int | None:
    """Return the memory limit, or None without one. Source: cgroup v2, memory.max."""
    limit = _text(_CGROUP / "memory.max").strip()
    return int(limit) if limit.isdecimal() else None


def _memlock_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY or _has_capability(_CAP_IPC_LOCK) else limit


def _may_renice() -> bool:
    if not hasattr(resource, "RLIMIT_NICE"):
        return os.geteuid() == 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return limit == resource.RLIM_INFINITY or limit >= _NICE_LIMIT or _has_capability(_CAP_SYS_NICE)


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
