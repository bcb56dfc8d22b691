"""What the name of a release's file says about it. Pure.

    llama-b11434-bin-ubuntu-x64.tar.gz                     CPU, Linux
    llama-b11434-bin-ubuntu-vulkan-arm64.tar.gz
    llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz           and the libraries that this needs:
    cudart-llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz
    llama-b11434-bin-macos-arm64.tar.gz                    Metal
    llama-b4000-bin-ubuntu-x64.zip                         an old one

Source: llama.cpp, .github/workflows/release.yml, and the files of b4000, b10621 and b11101.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(
    r"(?P<runtime>cudart-)?llama-(?P<tag>b\d{1,9})-bin-(?P<system>ubuntu|macos)-"
    r"(?:(?P<variant>[a-z]{2,16})-(?:(?P<version>[a-z0-9.]{1,16})-)?)?"
    r"(?P<processor>x64|arm64|s390x)\.(?:tar\.gz|zip)"
)


@dataclass(frozen=True, slots=True)
class AssetName:
    """A file of a release for Linux (`ubuntu`) or macOS.

    Attributes:
        variant: What it computes on: `cpu`, `metal`, `vulkan`, `cuda`, `rocm`, and others.
        version: Of that, such as `13.4`; empty without one.
        is_runtime: Whether it has only the libraries that another file needs beside it.
    """

    tag: str
    system: str
    processor: str
    variant: str
    version: str = ""
    is_runtime: bool = False

    @property
    def full_variant(self) -> str:
        return "-".join(filter(None, (self.variant, self.version)))

    @property
    def release(self) -> tuple[int, ...]:
        """The version in numbers, to compare; empty without one."""
        return tuple(int(part) for part in self.version.split(".") if part.isdecimal())


def parse(name: str) -> AssetName | None:
    """Return what a name says; None for files of other kinds, and for other systems."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    tag, system, variant, version, processor = found.group(
        "tag", "system", "variant", "version", "processor"
    )
    is_metal = (system, processor) == ("macos", "arm64")
    plain = "metal" if is_metal else "cpu"
    return AssetName(
        tag, system, processor, variant or plain, version or "", bool(found["runtime"])
    )
