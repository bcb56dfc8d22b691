"""Which weights are on devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.samples import model

from supervisor.models.metadata import Gguf
from supervisor.plan.placement import (
    Placement,
    fitted,
    layer_owners,
    layers_with_experts_kept,
    overrides,
    placed_weights,
)

LAYERS = 6
DENSE, EXPERT = 10, 100  # bytes of a layer's attention, and of each of its three expert tensors
NAMES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
MOE: Gguf = model(
    layers=LAYERS,
    kv_heads=(1,) * LAYERS,
    experts=4,
    experts_used=2,
    tensors=(
        ("token_embd.weight", 5),
        ("output.weight", 7),
        *((f"blk.{layer}.attn_q.weight", DENSE) for layer in range(LAYERS)),
        *((f"blk.{layer}.{name}.weight", EXPERT) for layer in range(LAYERS) for name in NAMES),
    ),
)
WHOLE = 7 + LAYERS * (DENSE + 3 * EXPERT)


def placed(found: Placement) -> int:
    return placed_weights(MOE, found, ("Vulkan0", "Vulkan1")).total


def fit_into(room: int) -> Placement:
    return fitted(MOE, lambda tried: placed(tried) <= room)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({}, WHOLE),
        ({"cpu-moe": True}, 7 + LAYERS * DENSE),
        ({"cpu-moe": False, "n-cpu-moe": 0}, WHOLE),
        ({"n-cpu-moe": 2}, WHOLE - 2 * 3 * EXPERT),
        ({"override-tensor": r"blk\.[01]\.ffn_up_exps=CPU,attn_q=CPU"}, WHOLE - 2 * EXPERT - 60),
        ({"override-tensor": "attn_q=Vulkan1"}, WHOLE),
        ({"override-tensor": "[=CPU"}, WHOLE),  # no engine starts with it
        ({"override-tensor": r"\.5\.ffn=Vulkan0", "cpu-moe": True}, 7 + LAYERS * DENSE + 300),
    ],
)
def test_the_first_override_decides(flags: dict[str, str | bool | int], size: int) -> None:
    assert placed(Placement(LAYERS + 1, overrides(flags))) == size


def test_a_tensor_in_main_memory_is_copied_for_large_batches() -> None:
    few = placed_weights(MOE, Placement(3), ("Vulkan0",))
    assert few.by_layer == (0, 0, 0, 0, 310, 310)
    assert (few.output, few.largest_kept) == (7, EXPERT)
    assert not placed_weights(MOE, Placement(LAYERS + 1), ("Vulkan0",)).largest_kept


def test_the_last_feed_forward_part_is_not_copied() -> None:
    def copied(pattern: str) -> int:
        kept = Placement(LAYERS + 1, ((pattern, "CPU"),))
        return placed_weights(MOE, kept, ("Vulkan0",)).largest_kept

    assert copied(rf"blk\.{LAYERS - 1}\.ffn_") == 0
    assert copied(rf"blk\.{LAYERS - 1}\.") == DENSE
    assert copied(rf"blk\.{LAYERS - 2}\.") == EXPERT


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("ffn_down_exps", 2),
        (rf"blk\.(2\.ffn_down|{LAYERS - 1}\.ffn)_", 2),
        (rf"blk\.{LAYERS - 1}\.ffn_down_exps", 0),  # not copied
        ("ffn_(up|down)_exps", 1),
        (r"ffn_gate_exps|2\.ffn_down_exps", 1),
        ("ffn_", 0),
        ("ffn_up_exps", 0),
    ],
)
def test_up_and_gate_may_be_on_a_device_without_down(pattern: str, count: int) -> None:
    kept = Placement(LAYERS + 1, ((pattern, "CPU"),))
    assert placed_weights(MOE, kept, ("Vulkan0",)).up_and_gate == count


def test_gate_and_up_may_be_one_tensor() -> None:
    names = ("blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight", "blk.1.attn_q.weight")
    fused = replace(MOE, layers=2, tensors=tuple((name, EXPERT) for name in names))

    def found(pattern: str) -> int:
        return placed_weights(fused, Placement(3, ((pattern, "CPU"),)), ("Vulkan0",)).up_and_gate

    assert (found("ffn_down"), found("ffn_")) == (2, 0)


def test_the_engine_fits_experts_before_layers() -> None:
    """As build 10434 does: experts leave from the last layer on, the first one keeps its own."""
    assert fit_into(WHOLE) == Placement(LAYERS + 1)
    assert fit_into(0) == Placement(0)
    for full in range(1, LAYERS):
        room = 7 + LAYERS * DENSE + full * 3 * EXPERT
        assert placed(fit_into(room)) == room
        assert layers_with_experts_kept(MOE, fit_into(room)) == (*range(full, LAYERS),)
    for parts in (1, 2):  # of the three tensors of a layer
        room = 7 + LAYERS * DENSE + (3 * 3 + parts) * EXPERT
        assert placed(fit_into(room)) == room
    dense = fit_into(7 + 3 * DENSE + 3 * EXPERT)  # too little for all layers without experts
    assert dense.layers == 4
    assert layers_with_experts_kept(MOE, dense) == (4, 5)


def test_a_shared_expert_stays_with_the_first_experts_that_stay() -> None:
    shared = tuple((f"blk.{layer}.ffn_up_shexp.weight", DENSE) for layer in range(LAYERS))
    moe = replace(MOE, tensors=(*MOE.tensors, *shared))

    def size(tried: Placement) -> int:
        return placed_weights(moe, tried, ()).total

    room = 7 + 2 * LAYERS * DENSE + 3 * 3 * EXPERT  # for the experts of three layers
    assert size(fitted(moe, lambda tried: size(tried) <= room)) == room - DENSE


def test_layers_in_main_memory_are_not_named_for_their_experts() -> None:
    assert layers_with_experts_kept(MOE, Placement(3, overrides({"n-cpu-moe": 5}))) == (4,)


def test_a_layer_goes_to_the_first_device_whose_share_ends_after_it() -> None:
    assert layer_owners((1, 1), 3) == (0, 0, 1, 1)
    assert layer_owners((3, 0, 1), 7, 4) == (0, 0, 0, 2)


def test_a_dense_model_is_fitted_by_layers() -> None:
    plain = model(layers=30)
    each = placed_weights(plain, Placement(2), ()).total
    found = fitted(plain, lambda tried: placed_weights(plain, tried, ()).total < 11 * each)
    assert found == Placement(11)
