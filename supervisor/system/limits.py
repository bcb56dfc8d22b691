"""Reads the limits of this process and the kernel's out-of-memory kills.

Limits are those of rlimits, of control groups, and of a task of Slurm, whose limits are control
groups only where its site wants that.

Limits of control groups are those of the process's own group and of every group above it.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max, memory.max, memory.events); for
version 1, scheduler/sched-bwc.rst (cpu.cfs_quota_us) and cgroup-v1/memory.rst
(memory.limit_in_bytes, memory.oom_control); mm/oom_kill.c (oom_kill of /proc/vmstat);
sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final

_resource: Final = import_module("resource") if find_spec("resource") else None
# Enough for any number of clients; with more, programs that close all descriptors get slow.
_FILES: Final = 65_536


def has_limit(name: str) -> bool:
    return hasattr(_resource, name)


def limit(name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit `name`, such as `RLIMIT_NOFILE`; None: unlimited."""
    if _resource is None or not has_limit(name):
        return None, None
    soft, hard = _resource.getrlimit(getattr(_resource, name))
    unlimited = _resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def set_soft_limit(name: str, value: int) -> None:
    """Set a soft limit, at most the hard one, if the system has it. Raises ValueError: refused."""
    if _resource is not None and has_limit(name):
        number = getattr(_resource, name)
        _, hard = _resource.getrlimit(number)
        value = value if hard == _resource.RLIM_INFINITY else min(value, hard)
        _resource.setrlimit(number, (value, hard))


def raise_file_limit() -> None:
    """Raise the soft limit of open files and sockets as far as the hard limit allows.

    Source: systemd's notes on RLIMIT_NOFILE: the soft limit is mostly 1 024 for select(2) only.
    """
    soft, _ = limit("RLIMIT_NOFILE")
    if soft is not None and soft < _FILES:
        # macOS has a maximum below the hard limit.
        with suppress(ValueError, OSError):
            set_soft_limit("RLIMIT_NOFILE", _FILES)


_MOUNT: Final = "sys/fs/cgroup"
# Beside version 1, version 2 is mounted here. Source: systemd, hybrid hierarchy.
_HYBRID: Final = "sys/fs/cgroup/unified"
# Engines that one shortage killed are reaped within this time.
_TOGETHER_S: Final = 2.0


def cpu_quota(root: Path) -> float | None:
    """Return the lowest CPU quota of all levels below `root`, in CPUs; None without one."""
    lines = [kernel_text(level / "cpu.max") for level in _levels(root, "")]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    old = ([kernel_text(level / name) for name in names] for level in _levels(root, "cpu"))
    lines += map(" ".join, old)
    return min((quota for quota in map(_quota, lines) if quota), default=None)


def memory_limit_bytes(root: Path) -> int | None:
    """Return the lowest memory limit of all levels, in bytes; None without one."""
    files = [level / "memory.max" for level in _levels(root, "")]
    files += [level / "memory.limit_in_bytes" for level in _levels(root, "memory")]
    found = (kernel_text(file).strip() for file in files)
    return min((int(limit) for limit in found if limit.isdecimal()), default=None)


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm runs this process on a node; it is false for `salloc` elsewhere."""
    return "SLURM_JOB_ID" in environ and "SLURMD_NODENAME" in environ


def slurm_limits(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the CPUs and the memory in bytes of Slurm's allocation on this node."""
    if not is_slurm_task(environ):
        return None, None
    # A memory of 0 is all that the node has.
    names = ("SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU")
    cpus, node_mib, cpu_mib = (
        int(found) if (found := environ.get(name, "")).isdecimal() else 0 for name in names
    )
    return cpus or None, (node_mib or cpu_mib * cpus) * 1024**2 or None


def pressure_file(root: Path) -> Path | None:
    """Return the CPU pressure file of the process's own group, if it has one."""
    files = [level / "cpu.pressure" for level in _levels(root, "")]
    # The root group of the hierarchy has none, because /proc/pressure/cpu is the same.
    return next((file for file in reversed(files) if file.exists()), None)


def oom_kills(root: Path) -> int | None:
    """Return how many processes the kernel has killed because memory ran out.

    Counts our control group, or the machine if the group has no count; None if neither is known.
    """
    files = [level / "memory.events" for level in _levels(root, "")]
    files += [level / "memory.oom_control" for level in _levels(root, "memory")]
    for file in (*reversed(files), root / "proc/vmstat"):
        for line in kernel_text(file).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


class OomKillWatch:
    """Tells whether the kernel has just killed a process because memory ran out.

    The kernel's count does not name the process, and one shortage may kill several, so a kill
    counts for two seconds.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._count = oom_kills(root)
        self._grown_at_s = -math.inf

    def has_killed(self) -> bool:
        """Return whether it has killed since the last call, or in the last two seconds."""
        before, self._count = self._count, oom_kills(self._root)
        if before is not None and self._count is not None and self._count > before:
            self._grown_at_s = self._clock()
        return self._clock() - self._grown_at_s < _TOGETHER_S


def _quota(line: str) -> float | None:
    quota, _, period = line.strip().partition(" ")
    return int(quota) / max(1, int(period)) if quota.isdecimal() and period.isdecimal() else None


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories from the mount point down to our group; "" stands for version 2.

    Some may not exist: a container may see its group's path on the host, but has only its own
    group's files, mounted at the top.
    """
    path = _own_path(kernel_text(root / "proc/self/cgroup"), controller)
    if path is None:
        return
    if controller:
        level = root / _MOUNT / controller
    else:
        level = root / (_HYBRID if (root / _HYBRID).is_dir() else _MOUNT)
    yield level
    for part in path.parts[1:]:
        level /= part
        yield level


def _own_path(groups: str, controller: str) -> PurePosixPath | None:
    """Find our group in lines of `number:controllers:path`; version 2 names no controllers."""
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            # A group outside the namespace's root is shown as /../name.
            return PurePosixPath("/") if ".." in path else PurePosixPath(path)
    return None


def kernel_text(path: Path) -> str:
    """Read a small file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
