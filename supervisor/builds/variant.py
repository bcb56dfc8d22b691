"""Chooses the files of a release for this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from supervisor.builds.releases import Asset, Release
from supervisor.errors import EngineMissing
from supervisor.system import devices

_SYSTEMS: Final = {"Linux": "ubuntu", "Darwin": "macos"}
_PROCESSORS: Final = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64", "s390x": "s390x"}


@dataclass(frozen=True, slots=True)
class Target:
    system: str  # as in the names of releases' files, like `processor`
    processor: str
    nvidia_driver: int | None = None  # the major version of NVIDIA's driver, or None
    has_gpu: bool = False  # whether it has a device that Vulkan may use

    def __str__(self) -> str:
        system = "Linux" if self.system == "ubuntu" else "macOS"
        return f"{system} {self.processor}"


def this_machine(render_nodes: Path = Path("/dev/dri")) -> Target:
    """Describe this machine; `render_nodes` has GPUs. Raises EngineMissing without a release."""
    system = _SYSTEMS.get(platform.system())
    processor = _PROCESSORS.get(platform.machine().lower().replace("amd64", "x86_64"))
    if not system or not processor:
        raise EngineMissing(
            f"llama.cpp releases no build for {platform.system()} on {platform.machine()}",
            hint="corral engine build newest compiles one here",
        )
    nvml = devices.load_nvml()
    driver = nvidia_driver(nvml) if nvml else None
    return Target(
        system, processor, driver, driver is not None or any(render_nodes.glob("renderD*"))
    )


def nvidia_driver(nvml: Any) -> int | None:
    """Return the major version of NVIDIA's driver; None if it is unknown."""
    try:
        nvml.nvmlInit()
        version: str = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:  # the library is there, but the driver is not loaded
        return None
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else None


Variant = Literal["cpu", "vulkan", "cuda", "rocm", "metal"]

# The oldest driver for each major version of CUDA. Source: NVIDIA, CUDA Compatibility, "Minor
# Version Compatibility": 525 for CUDA 12, 580 for CUDA 13.
_DRIVERS: Final[Mapping[int, int]] = {12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class Choice:
    """The files to install, the engine's first, and the reason for the choice."""

    assets: tuple[Asset, ...]
    reason: str

    @property
    def engine(self) -> Asset:
        return self.assets[0]

    @property
    def name(self) -> str:
        return f"{self.engine.tag}-{self.engine.full_variant}"

    @property
    def size_bytes(self) -> int:
        return sum(asset.size_bytes for asset in self.assets)


def choose(release: Release, target: Target, variant: str | None) -> Choice:
    """Choose the files of a release for a machine.

    The release has a build number. Without `variant`, it is the best backend for the machine.
    Raises EngineMissing if the release has no such build for it.
    """
    place = (target.system, target.processor)
    there = [asset for asset in release.assets if (asset.system, asset.processor) == place]
    for wanted, reason in [(variant, "as you said")] if variant else _suitable_variants(target):
        if engine := _newest_file(there, wanted, target):
            same = (asset for asset in there if asset.full_variant == engine.full_variant)
            return Choice((engine, *(asset for asset in same if asset.is_runtime)), reason)
    raise _no_variant_error(release, there, target, variant)


def _suitable_variants(target: Target) -> Iterator[tuple[str, str]]:
    """Yield the variants for a machine with the reason for each, the best first."""
    if target.system == "macos":
        yield "metal", "because Metal computes on the GPU of this Mac"
    if target.nvidia_driver and target.nvidia_driver >= min(_DRIVERS.values()):
        yield "cuda", f"because there is an NVIDIA device with driver {target.nvidia_driver}"
    if target.has_gpu and target.system != "macos":
        yield "vulkan", "because there is a GPU, and Vulkan computes on those of all makers"
    yield "cpu", f"because {'there is no build for its' if target.has_gpu else 'there is no'} GPU"
    yield "vulkan", "because there is no build for the CPU alone, and this computes on it too"


def _newest_file(there: list[Asset], variant: str, target: Target) -> Asset | None:
    found = [
        asset
        for asset in there
        if asset.variant == variant
        and not asset.is_runtime
        and (variant != "cuda" or _runs(asset.release, target))
    ]
    return max(found, key=lambda asset: asset.release, default=None)


def _runs(version: tuple[int, ...], target: Target) -> bool:
    """Return whether the driver supports a CUDA version; without one, the oldest known driver."""
    needed = _DRIVERS.get(version[0]) if version else None
    return needed is not None and (target.nvidia_driver or min(_DRIVERS.values())) >= needed


def _no_variant_error(
    release: Release, there: list[Asset], target: Target, variant: str | None
) -> EngineMissing:
    names = sorted({asset.full_variant for asset in there})
    what = f"{variant} build" if variant else "build"
    driver = " that its driver supports" if variant == "cuda" and target.nvidia_driver else ""
    has = f"; it has {', '.join(names)}" if names else ""
    hint = "choose one of these with --variant" if names else "another build may have one"
    if variant == "cuda" and "vulkan" in names:
        hint = "--variant vulkan computes on NVIDIA devices too"
    return EngineMissing(
        f"llama.cpp {release.tag} has no {what} for {target}{driver}{has}", hint=hint
    )
