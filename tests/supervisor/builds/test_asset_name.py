from __future__ import annotations

import pytest

from supervisor.builds.releases import Asset, parse


def asset(
    name: str,
    tag: str,
    system: str,
    processor: str,
    variant: str,
    version: str = "",
    *,
    is_runtime: bool = False,
) -> Asset:
    return Asset(name, "", 0, None, tag, system, processor, variant, version, is_runtime)


# Those of b11101 for Linux and macOS, and of an old build.
NAMES = {
    "llama-b11101-bin-macos-arm64.tar.gz": asset(
        "llama-b11101-bin-macos-arm64.tar.gz", "b11101", "macos", "arm64", "metal"
    ),
    "llama-b11101-bin-macos-x64.tar.gz": asset(
        "llama-b11101-bin-macos-x64.tar.gz", "b11101", "macos", "x64", "cpu"
    ),
    "llama-b11101-bin-ubuntu-x64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-x64.tar.gz", "b11101", "ubuntu", "x64", "cpu"
    ),
    "llama-b11101-bin-ubuntu-s390x.tar.gz": asset(
        "llama-b11101-bin-ubuntu-s390x.tar.gz", "b11101", "ubuntu", "s390x", "cpu"
    ),
    "llama-b11101-bin-ubuntu-vulkan-arm64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-vulkan-arm64.tar.gz", "b11101", "ubuntu", "arm64", "vulkan"
    ),
    "llama-b11101-bin-ubuntu-cuda-13.4-x64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-cuda-13.4-x64.tar.gz", "b11101", "ubuntu", "x64", "cuda", "13.4"
    ),
    "cudart-llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz": asset(
        "cudart-llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz",
        "b11101",
        "ubuntu",
        "x64",
        "cuda",
        "12.8",
        is_runtime=True,
    ),
    "llama-b11101-bin-ubuntu-rocm-10.0-x64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-rocm-10.0-x64.tar.gz", "b11101", "ubuntu", "x64", "rocm", "10.0"
    ),
    "llama-b11101-bin-ubuntu-openvino-2026.4-x64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-openvino-2026.4-x64.tar.gz",
        "b11101",
        "ubuntu",
        "x64",
        "openvino",
        "2026.4",
    ),
    "llama-b11101-bin-ubuntu-sycl-fp16-x64.tar.gz": asset(
        "llama-b11101-bin-ubuntu-sycl-fp16-x64.tar.gz", "b11101", "ubuntu", "x64", "sycl", "fp16"
    ),
    "llama-b4000-bin-ubuntu-x64.zip": asset(
        "llama-b4000-bin-ubuntu-x64.zip", "b4000", "ubuntu", "x64", "cpu"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_tells_system_processor_and_variant(name: str) -> None:
    assert parse(name) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "cudart-llama-bin-win-cuda-12.4-x64.zip",
        "llama-b11101-bin-android-arm64.tar.gz",
        "llama-b11101-bin-linux-arm64-snapdragon.tar.gz",
        "llama-b11101-bin-win-cpu-x64.zip",
        "llama-b11101-ui.tar.gz",
        "llama-b11101-xcframework.zip",
        "nightly-tag.txt",
        "../llama-b1-bin-ubuntu-x64.tar.gz",
        "llama-b1-bin-ubuntu-../x-x64.tar.gz",
    ],
)
def test_other_files_are_none(name: str) -> None:
    assert parse(name) is None


def test_versions_are_compared_as_numbers() -> None:
    names = [f"llama-b1-bin-ubuntu-cuda-{name}-x64.tar.gz" for name in ("9.4", "12.8", "12.10")]
    found = [entry.release for entry in map(parse, names) if entry]
    assert sorted(found) == found
