from __future__ import annotations

import pytest

from supervisor.builds.releases import Release, parse
from supervisor.builds.variant import Target, choose
from supervisor.errors import EngineMissing

NEW = (
    "cudart-llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "cudart-llama-b11101-bin-ubuntu-cuda-13.4-arm64.tar.gz",
    "cudart-llama-b11101-bin-ubuntu-cuda-13.4-x64.tar.gz",
    "cudart-llama-bin-win-cuda-12.4-x64.zip",
    "llama-b11101-bin-macos-arm64.tar.gz",
    "llama-b11101-bin-macos-x64.tar.gz",
    "llama-b11101-bin-ubuntu-arm64.tar.gz",
    "llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "llama-b11101-bin-ubuntu-cuda-13.4-arm64.tar.gz",
    "llama-b11101-bin-ubuntu-cuda-13.4-x64.tar.gz",
    "llama-b11101-bin-ubuntu-rocm-10.0-x64.tar.gz",
    "llama-b11101-bin-ubuntu-vulkan-arm64.tar.gz",
    "llama-b11101-bin-ubuntu-vulkan-x64.tar.gz",
    "llama-b11101-bin-ubuntu-x64.tar.gz",
    "llama-b11101-ui.tar.gz",
)
OLD = (
    "llama-b9849-bin-macos-arm64.tar.gz",
    "llama-b9849-bin-ubuntu-vulkan-x64.tar.gz",
    "llama-b9849-bin-ubuntu-x64.tar.gz",
)
PLAIN = Target("ubuntu", "x64")
RADEON = Target("ubuntu", "x64", has_gpu=True)


def geforce(driver: int, processor: str = "x64") -> Target:
    return Target("ubuntu", processor, nvidia_driver=driver, has_gpu=True)


def release(*names: str) -> Release:
    assets = (parse(name, f"https://h/{name}", 10, "0" * 64) for name in names)
    return Release("b11101", tuple(filter(None, assets)))


@pytest.mark.parametrize(
    ("target", "names", "chosen"),
    [
        (PLAIN, NEW, "b11101-cpu"),
        (RADEON, NEW, "b11101-vulkan"),
        (geforce(580), NEW, "b11101-cuda-13.4"),
        (geforce(575), NEW, "b11101-cuda-12.8"),
        (geforce(470), NEW, "b11101-vulkan"),
        (geforce(575, "arm64"), NEW, "b11101-vulkan"),
        (geforce(580), OLD, "b9849-vulkan"),
        (PLAIN, OLD[:2], "b9849-vulkan"),
        (Target("ubuntu", "arm64"), NEW, "b11101-cpu"),
        (Target("macos", "arm64"), NEW, "b11101-metal"),
        (Target("macos", "x64", has_gpu=True), NEW, "b11101-cpu"),
    ],
)
def test_what_suits_a_machine(target: Target, names: tuple[str, ...], chosen: str) -> None:
    assert choose(release(*names), target, None).name == chosen


@pytest.mark.parametrize(
    ("target", "variant", "chosen"),
    [
        (geforce(580), "cpu", "b11101-cpu"),
        (PLAIN, "rocm", "b11101-rocm-10.0"),
        (PLAIN, "cuda", "b11101-cuda-12.8"),
        (geforce(580), "cuda", "b11101-cuda-13.4"),
    ],
)
def test_a_variant_that_is_wanted(target: Target, variant: str, chosen: str) -> None:
    assert choose(release(*NEW), target, variant).name == chosen


def test_a_cuda_build_comes_with_its_libraries() -> None:
    found = choose(release(*NEW), geforce(575), None)
    assert [asset.name for asset in found.assets] == [
        "llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz",
        "cudart-llama-b11101-bin-ubuntu-cuda-12.8-x64.tar.gz",
    ]
    assert found.size_bytes == 20


def test_a_missing_variant_is_named_with_the_variants_of_the_release() -> None:
    with pytest.raises(EngineMissing, match="no metal build for Linux x64; it has cpu") as found:
        choose(release(*OLD), PLAIN, "metal")
    assert "--variant" in str(found.value.hint)
    with pytest.raises(EngineMissing) as found:
        choose(release(*OLD), geforce(580), "cuda")
    assert found.value.hint == "--variant vulkan computes on NVIDIA devices too"
    with pytest.raises(EngineMissing, match="no build for Linux s390x"):
        choose(release(*OLD), Target("ubuntu", "s390x"), None)
