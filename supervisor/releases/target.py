"""What of this machine decides which build suits it."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import EngineMissing
from supervisor.host import nvml
from supervisor.host.nvml import Library

_SYSTEMS: Final = {"Linux": "ubuntu", "Darwin": "macos"}
_PROCESSORS: Final = {
    "x86_64": "x64",
    "amd64": "x64",
    "aarch64": "arm64",
    "arm64": "arm64",
    "s390x": "s390x",
}
_RENDER_NODES: Final = Path("/dev/dri")
_VERSION_MAX_BYTES: Final = 80  # Source: nvml.h, NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


@dataclass(frozen=True, slots=True)
class Target:
    """A machine.

    Attributes:
        system, processor: As in the names of releases' files.
        nvidia_driver: The major version of NVIDIA's driver; None without one.
        has_gpu: Whether it has a device that Vulkan may use.
    """

    system: str
    processor: str
    nvidia_driver: int | None = None
    has_gpu: bool = False

    def __str__(self) -> str:
        system = "Linux" if self.system == "ubuntu" else "macOS"
        return f"{system} {self.processor}"


def this_machine() -> Target:
    """Return what this machine is.

    Raises:
        EngineMissing: llama.cpp releases nothing for its system or processor.
    """
    system = _SYSTEMS.get(platform.system())
    processor = _PROCESSORS.get(platform.machine().lower())
    if not system or not processor:
        raise EngineMissing(
            f"llama.cpp releases no build for {platform.system()} on {platform.machine()}",
            hint="compile llama-server and set engine to its path",
        )
    library = nvml.library()
    driver = nvidia_driver(library) if library else None
    return Target(system, processor, driver, driver is not None or _has_render_node())


def nvidia_driver(library: Library) -> int | None:
    """Return the major version of NVIDIA's driver; None if it does not say.

    Source: NVML API reference, nvmlSystemGetDriverVersion.
    """
    text = ctypes.create_string_buffer(_VERSION_MAX_BYTES)
    try:
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
            return None
    except AttributeError:
        return None
    major = text.value.decode("ascii", "replace").partition(".")[0]
    return int(major) if major.isdecimal() else None


def _has_render_node() -> bool:
    return any(_RENDER_NODES.glob("renderD*"))
