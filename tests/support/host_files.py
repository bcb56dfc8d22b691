"""Lays out `proc` and `sys` of machines that are not at hand."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostFiles:
    root: Path

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", "utf-8")

    def replace(self, path: str, text: str) -> None:
        """Write so that a reader sees the file before or after."""
        self.write(f"{path}.new", text)
        (self.root / f"{path}.new").replace(self.root / path)

    def cores(self, siblings: Iterable[str], *, name: str = "core_cpus_list") -> None:
        """One physical core for each list of CPUs."""
        for line in siblings:
            for cpu in line.replace("-", ",").split(","):
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", line)

    def capacities(self, by_cpu: Mapping[int, int]) -> None:
        for cpu, capacity in by_cpu.items():
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))

    def numa_nodes(self, *cpus: str) -> None:
        for number, line in enumerate(cpus):
            self.write(f"sys/devices/system/node/node{number}/cpulist", line)

    def group(self, path: str) -> None:
        self.write("proc/self/cgroup", f"0::{path}")

    def limit(self, path: str, name: str, text: str) -> None:
        self.write(f"sys/fs/cgroup{path}/{name}", text)
