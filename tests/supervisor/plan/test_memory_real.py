"""The estimate against the allocations that the real engine logs; see scripts/bench/memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from support import tiny_moe
from support.buffers import compare

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue

WORST: Final = 0.02
CASES: Final[tuple[dict[str, FlagValue], ...]] = (
    {"ctx-size": 1024, "parallel": 4, "kv-unified": False, "flash-attn": "off"},
    {"ctx-size": 4096, "parallel": 2, "kv-unified": False, "flash-attn": "on"},
    {"ctx-size": 4096, "parallel": 4, "kv-unified": True, "flash-attn": "off"},
    {"ctx-size": 2048, "parallel": 1, "flash-attn": "auto", "ubatch-size": 64},
    {"ctx-size": 5000, "parallel": 3, "cache-type-k": "q8_0", "cache-type-v": "q4_0"},
    {"ctx-size": 4096, "parallel": 2, "spec-type": "ngram-mod", "batch-size": 128},
    {},
)


@pytest.mark.parametrize("flags", CASES, ids=str)
def test_the_engine_allocates_the_estimated_memory(
    engine: Engine, smollm2: Path, flags: dict[str, FlagValue]
) -> None:
    found = compare(engine, smollm2, {"spec-type": "none", **flags})
    assert abs(found.error) < WORST, found


def test_a_draft_takes_the_estimated_memory(engine: Engine, smollm2: Path) -> None:
    found = compare(engine, smollm2, {"ctx-size": 2048, "parallel": 2}, draft=smollm2)
    assert abs(found.error) < WORST, found


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("qwen3moe", tiny_moe.Size(embd=1024, ff=256)),
        ("glm4moe", tiny_moe.Size()),
        ("glm4moe", tiny_moe.Size(embd=1024, ff=256)),
    ],
)
def test_experts_take_the_estimated_memory(
    engine: Engine, tmp_path: Path, kind: tiny_moe.Kind, size: tiny_moe.Size
) -> None:
    """The width of a layer decides which of its operations has the peak of the compute buffer."""
    model = tiny_moe.make(tmp_path / "moe.gguf", kind, size)
    flags: dict[str, FlagValue] = {"ctx-size": 8192, "parallel": 1, "flash-attn": "on"}
    found = compare(engine, model, {**flags, "kv-unified": False})
    assert abs(found.error) < WORST, found
    assert abs(found.part_error("compute")) < 0.005, found
