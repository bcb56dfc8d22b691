"""Chooses the files of a release for a machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.errors import EngineMissing
from supervisor.releases.asset_name import AssetName
from supervisor.releases.release import Asset, Release
from supervisor.releases.target import Target

Variant = Literal["cpu", "vulkan", "cuda", "rocm", "metal"]
_File = tuple[AssetName, Asset]

# The oldest driver for each major version of CUDA. Source: NVIDIA, CUDA Compatibility, "Minor
# Version Compatibility": 525 for CUDA 12, 580 for CUDA 13.
_DRIVERS: Final[Mapping[int, int]] = {12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class Choice:
    """The files to install, the one with the engine first, and why these."""

    assets: tuple[Asset, ...]
    named: AssetName
    reason: str

    @property
    def name(self) -> str:
        return f"{self.named.tag}-{self.named.full_variant}"

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.assets)


def choose(release: Release, target: Target, variant: str | None) -> Choice:
    """Choose the files of a release for a machine.

    Args:
        release: Of a build.
        target: The machine.
        variant: What the engine is to compute on; None for what suits the machine best.

    Raises:
        EngineMissing: The release has no such build for this machine.
    """
    there = list(_files(release, target))
    for wanted, reason in [(variant, "as you said")] if variant else _suitable(target):
        if found := _newest(there, wanted, target):
            named = found[0]
            runtimes = (
                asset
                for name, asset in there
                if name.is_runtime and name.full_variant == named.full_variant
            )
            return Choice((found[1], *runtimes), named, reason)
    raise _missing(release, there, target, variant)


def _files(release: Release, target: Target) -> Iterator[_File]:
    """Yield the files of a release for a machine."""
    for one in release.assets:
        name, place = one.parsed, (target.system, target.processor)
        if name and (name.system, name.processor) == place:
            yield name, one


def _suitable(target: Target) -> Iterator[tuple[str, str]]:
    """Yield the variants for a machine, the best first, each with the reason for it."""
    if target.system == "macos":
        yield "metal", "because Metal computes on the GPU of this Mac"
    if target.nvidia_driver and target.nvidia_driver >= min(_DRIVERS.values()):
        yield "cuda", f"because there is an NVIDIA device with driver {target.nvidia_driver}"
    if target.has_gpu and target.system != "macos":
        yield "vulkan", "because there is a GPU, and Vulkan computes on those of all makers"
    yield "cpu", f"because {'there is no build for its' if target.has_gpu else 'there is no'} GPU"
    yield "vulkan", "because there is no build for the CPU alone, and this computes on it too"


def _newest(there: list[_File], variant: str, target: Target) -> _File | None:
    """Return the file of a variant with the newest version that the driver supports."""
    found = [
        (name, asset)
        for name, asset in there
        if name.variant == variant
        and not name.is_runtime
        and (variant != "cuda" or _runs(name.release, target))
    ]
    return max(found, key=lambda one: one[0].release, default=None)


def _runs(version: tuple[int, ...], target: Target) -> bool:
    """Return whether the driver supports a version of CUDA; without a driver, the oldest known."""
    needed = _DRIVERS.get(version[0]) if version else None
    return needed is not None and (target.nvidia_driver or min(_DRIVERS.values())) >= needed


def _missing(
    release: Release, there: list[_File], target: Target, variant: str | None
) -> EngineMissing:
    names = sorted({name.full_variant for name, _ in there})
    what = f"{variant} build" if variant else "build"
    driver = " that its driver supports" if variant == "cuda" and target.nvidia_driver else ""
    has = f"; it has {', '.join(names)}" if names else ""
    return EngineMissing(
        f"llama.cpp {release.tag} has no {what} for {target}{driver}{has}",
        hint=_hint(names, variant),
    )


def _hint(names: list[str], variant: str | None) -> str:
    if variant == "cuda" and "vulkan" in names:
        return "--variant vulkan computes on NVIDIA devices too"
    return "choose one of these with --variant" if names else "another build may have one"
