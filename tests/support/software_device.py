"""Mesa's software Vulkan device: llama-server offloads to it as to a GPU, on any machine.

Its memory is main memory, of which an engine lists gigabytes; `write_engine` makes an engine that
lists less, and `limit_buffers` has its allocations fail.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from support.engine_scripts import library_exports

from supervisor.builds.discover import Device

# ggml lists a software device only where it is named; without F16 it compiles fewer shaders.
# Source: ggml-vulkan.cpp, ggml_vk_instance_init.
SHOW: Final = {
    "GGML_VK_VISIBLE_DEVICES": "0",
    "GGML_VK_DISABLE_F16": "1",
    "VK_LOADER_DRIVERS_DISABLE": "none",
}
NAMES: Final = ("llvmpipe", "lavapipe", "swiftshader")
HOW_TO_INSTALL: Final = "no software Vulkan device: apt-get install mesa-vulkan-drivers"


def is_one(devices: Sequence[Device]) -> bool:
    """Whether it is the only device."""
    return len(devices) == 1 and any(name in devices[0].description.lower() for name in NAMES)


def is_installed(engine: Path) -> bool:
    """Whether a llama-server lists it."""
    listed = subprocess.run(
        [engine, "--list-devices"], env=os.environ | SHOW, capture_output=True, check=True
    )
    return any(name in listed.stdout.decode("utf-8", "replace").lower() for name in NAMES)


def limit_buffers(limit_bytes: int) -> Mapping[str, str]:
    """Return variables with which the device refuses larger buffers, as if it were full."""
    return {"GGML_VK_FORCE_MAX_BUFFER_SIZE": str(limit_bytes)}


@dataclass(frozen=True)
class SmallDevice:
    """An engine on the software device, which it lists as smaller; `free` may change."""

    engine: Path
    _free: Path
    _listings: Path
    _engines: Path

    @property
    def engines(self) -> int:
        """How many engines run, of one that was written with `engine_mib`."""
        pids = [int(file.name) for file in self._engines.iterdir()]
        return sum(psutil.pid_exists(pid) for pid in pids)

    @property
    def listings(self) -> int:
        """How often it was listed."""
        return len(self._listings.read_text("utf-8").splitlines())

    def set_free(self, mib: int) -> None:
        new = self._free.with_suffix(".new")
        new.write_text(str(mib), "utf-8")
        new.replace(self._free)  # a listing never reads half of it


def write_engine(
    directory: Path,
    engine: Path,
    total_mib: int,
    library_dirs: Sequence[Path] = (),
    engine_mib: int = 0,
) -> SmallDevice:
    """Write an engine that lists the device with so much memory; else it is the real one.

    Each running engine with a model takes `engine_mib` from the free memory that is set.
    `library_dirs` go first on its library path.
    """
    path, free, listings = (directory / name for name in ("llama-server", "free", "listings"))
    engines = directory / "engines"
    engines.mkdir()
    exports = library_exports(engine, library_dirs)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--list-devices*) echo >>{listings}; echo "Available devices:"\n'
        f"free=$(cat {free})\n"
        f"for pid in $(ls {engines}); do\n"
        f"kill -0 $pid 2>/dev/null && free=$((free - {engine_mib})); done\n"
        "[ $free -ge 0 ] || free=0\n"
        f'echo "  Vulkan0: llvmpipe ({total_mib} MiB, $free MiB free)"; exit ;;\n'
        f"*--model*) touch {engines}/$$ ;; esac\n"
        f'{exports}exec {engine} "$@"\n',
        "utf-8",
    )
    path.chmod(0o700)
    found = SmallDevice(path, free, listings, engines)
    found.set_free(total_mib)
    return found
