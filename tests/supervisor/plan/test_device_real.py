"""The estimate of a device's memory, compared with the log of the engine that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_gguf, tiny_moe
from support.buffers import compare

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue

DEVICE = "Vulkan0"
COMMON: dict[str, FlagValue] = {"flash-attn": "on", "kv-unified": False, "ctx-size": 8192}
CASES: dict[str, dict[str, FlagValue]] = {
    "all layers": {"gpu-layers": "all", "parallel": 1},
    "quantised cache, four slots": {
        "gpu-layers": "all",
        "parallel": 4,
        "cache-type-k": "q8_0",
        "cache-type-v": "q8_0",
    },
    "half of the layers": {"gpu-layers": 3, "parallel": 2},
    "no layers, but large batches": {"gpu-layers": 0, "parallel": 1},
    "no flash attention": {"gpu-layers": "all", "parallel": 1, "flash-attn": "off"},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose buffers are large enough for the two decimals of the log."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return tiny_gguf.make(path, embd=256, heads=8, kv_heads=4, layers=4, ff=1024, ctx=8192)


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_a_device_is_within_a_tenth_of_the_engines_log(
    device_engine: Engine, wide_model: Path, case: str
) -> None:
    found = compare(device_engine, wide_model, {**COMMON, **CASES[case]}, device=DEVICE)
    logged = {part: round(size / 2**20, 2) for part, size in found.logged.items()}
    estimated = {part: round(size / 2**20, 2) for part, size in found.estimated.items()}
    assert abs(found.error) < 0.1, (logged, estimated)


SOME_TENSORS = r"blk\.[1-4]\.ffn_(up|down)_exps=CPU"
FEW_LAYERS = 5
LAST_EXPERTS = r"blk\.7\.ffn_(gate|up)_exps=CPU"
PLACED: tuple[tuple[tiny_moe.Kind, dict[str, FlagValue]], ...] = (
    ("qwen3moe", {"fit": "on"}),  # of one layer, its `down` experts alone are in main memory
    ("qwen3moe", {"gpu-layers": "all", "n-cpu-moe": 4}),
    ("gpt-oss", {"gpu-layers": "all", "override-tensor": SOME_TENSORS}),
    ("gpt-oss", {"gpu-layers": "all", "override-tensor": LAST_EXPERTS}),
    ("glm4moe", {"gpu-layers": FEW_LAYERS}),
    ("deepseek2", {"fit": "on"}),
    ("deepseek2", {"gpu-layers": "all"}),
)


@pytest.mark.parametrize(("kind", "flags"), PLACED)
def test_the_placement_of_experts_is_that_of_the_engine(
    device_engine: Engine, tmp_path: Path, kind: tiny_moe.Kind, flags: dict[str, FlagValue]
) -> None:
    """Weights and cache agree to the two decimals of the log, the compute buffer to 0.4 %.

    With few layers on the device, its compute buffer is larger than estimated.
    """
    model = tiny_moe.make(tmp_path / "moe.gguf", kind, tiny_moe.Size())
    if "fit" in flags:  # too little room for all experts
        flags = {**flags, "fit-target": device_engine.devices[0].total_mib - 170}
    found = compare(device_engine, model, {**COMMON, "parallel": 1, **flags}, device=DEVICE)
    for part in ("weights", "kv"):
        logged, estimated = found.logged[part], found.estimated[part]
        assert abs(estimated - logged) < 2**20 / 50, (part, logged, estimated)
    worst = 0.1 if flags.get("gpu-layers") == FEW_LAYERS else 0.004
    assert abs(found.part_error("compute")) < worst, (found.logged, found.estimated)


@pytest.mark.parametrize("kept", ["gate|down", "up|down", "gate|up|down"])
def test_the_compute_buffer_depends_on_the_experts_on_the_device(
    device_engine: Engine, tmp_path: Path, kept: str
) -> None:
    """The output of the `down` experts is wider than that of the others here."""
    size = tiny_moe.Size(embd=1024, layers=4, heads=16, experts=8)
    model = tiny_moe.make(tmp_path / "moe.gguf", "qwen3moe", size)
    tensors = rf"blk\.1\.ffn_({kept})_exps=CPU"
    flags = {**COMMON, "parallel": 1, "gpu-layers": "all", "override-tensor": tensors}
    found = compare(device_engine, model, flags, device=DEVICE)
    assert abs(found.part_error("compute")) < 0.01, (found.logged, found.estimated)
