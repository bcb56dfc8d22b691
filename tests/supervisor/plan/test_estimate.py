"""The estimate against figures of real logs, and its dependence on options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.samples import GIB, GPU, engine, model

from supervisor.builds.discover import Device
from supervisor.plan.estimate import Estimate, MemoryInputs, estimate

MIB = 1024**2
GEMMA = model(
    architecture="gemma3",
    layers=18,
    heads=4,
    kv_heads=(1,) * 18,
    key_length=256,
    value_length=256,
    embedding_length=640,
    feed_forward=2048,
    ctx_train=32768,
    vocab_size=262144,
    tokenizer="llama",
    sliding_window=512,
    sliding=tuple(layer % 6 < 5 for layer in range(18)),
    tensor_bytes=246_586_112,
    embedding_bytes=178_257_920,
    matrix_bytes=(("Q4_K", 32, 13_271_040), ("Q5_0", 32, 43_591_680)),
)
SECOND = Device("Vulkan1", "another GPU", GPU.total_mib)


def taken(of: Any = None, on: Any = None, **flags: Any) -> Estimate:
    chosen = {key.replace("_", "-"): value for key, value in flags.items()}
    return estimate(MemoryInputs(of or model(), chosen, on or engine(), frozenset({"avx2"})))


# Gemma-3-270M Q4_K_M, build 10434, --flash-attn on: figures of its log, in MiB.
@pytest.mark.parametrize(
    ("ctx", "slots", "unified", "ubatch", "kv", "compute"),
    [
        (1024, 1, False, 512, 18.0, 19.77),
        (2048, 2, True, 512, 28.5, 21.27),
        (4096, 4, True, 512, 49.5, 24.27),
        (4096, 4, False, 512, 72.0, 19.77),
        (4096, 1, False, 32, 23.25, 1.41),
        (4096, 1, False, 2048, 49.5, 97.08),
        (16384, 4, False, 512, 108.0, 22.77),
    ],
)
def test_a_sliding_window_takes_the_logged_memory(
    ctx: int, slots: int, *, unified: bool, ubatch: int, kv: float, compute: float
) -> None:
    found = taken(
        GEMMA,
        ctx_size=ctx,
        parallel=slots,
        kv_unified=unified,
        ubatch_size=ubatch,
        flash_attn="on",
    ).host
    assert found.kv / MIB == kv
    assert found.compute / MIB == pytest.approx(compute, rel=0.01)
    assert found.output / MIB == slots
    assert found.copies / MIB == pytest.approx(12.66, abs=0.01)


def test_swa_full_takes_more_memory() -> None:
    few, whole = (taken(GEMMA, ctx_size=4096, parallel=1, swa_full=full) for full in (False, True))
    assert (few.host.kv / MIB, whole.host.kv / MIB) == (27.0, 72.0)


def test_only_caches_that_cannot_be_truncated_have_checkpoints() -> None:
    flags = {"ctx_size": 8192 * 2, "parallel": 2}
    assert taken(**flags).host.checkpoints == 0
    # One every 8192 tokens and two at the end of a prompt, of 7.5 MiB, in each slot.
    assert taken(GEMMA, **flags).host.checkpoints == 2 * 3 * 7.5 * MIB
    assert taken(GEMMA, **flags, ctx_checkpoints=1).host.checkpoints == 2 * 7.5 * MIB
    assert taken(GEMMA, **flags, swa_full=True).host.checkpoints == 0


def test_recurrent_layers_keep_a_state_for_each_slot() -> None:
    mamba = model(kv_heads=(0,) * 30, state_values=1000)
    found = taken(mamba, ctx_size=4096, parallel=2).host
    assert found.kv == 2 * 4000
    assert found.checkpoints == 2 * 2 * 4000


def test_the_prompt_cache_and_checkpoints_are_not_allocated_at_the_start() -> None:
    found = taken(ctx_size=4096, cache_ram=100)
    assert found.host.prompt_cache == 100 * MIB
    assert found.host.total - found.host.at_start == 100 * MIB
    assert taken(ctx_size=4096, cache_ram=0).host.prompt_cache == 0


def test_weights_that_are_mapped_are_shared_and_others_are_not() -> None:
    assert taken().mapped_bytes == model().tensor_bytes
    assert taken(load_mode="none").mapped_bytes == 0
    assert taken(load_mode="none").own_bytes == taken().host.total


def test_matrices_of_types_that_the_cpu_repacks_count_twice() -> None:
    assert taken(GEMMA).host.copies == 13_271_040
    assert taken(GEMMA, repack=False).host.copies == 0
    odd = replace(GEMMA, matrix_bytes=(("Q4_K", 1, 144),))
    assert taken(odd).host.copies == 0
    amx = MemoryInputs(GEMMA, {}, engine(), frozenset({"avx2", "amx_int8"}))
    assert estimate(amx).host.copies == 13_271_040 + 13_271_040 // 144 * 4
    narrow = replace(GEMMA, matrix_bytes=(("Q4_K", 8, 144), ("Q8_0", 8, 34)))
    assert estimate(replace(amx, gguf=narrow)).host.copies == 144
    full = MemoryInputs(model(), {}, engine(), frozenset({"amx_int8"}))
    assert estimate(full).host.copies == 66_000_000
    assert estimate(replace(full, engine=engine(library_dirs=(model().path,)))).host.copies == 0


@pytest.mark.parametrize(
    ("flags", "freed"),
    [
        ({}, 13_271_040),
        ({"load_mode": "none"}, 13_271_040),
        ({"mlock": True, "mmap": False}, 13_271_040),
        ({"load_mode": "mmap+mlock"}, 0),
        ({"mlock": True}, 0),
        ({"repack": False}, 0),
    ],
)
def test_what_is_repacked_need_not_stay_in_memory_twice_unless_locked(
    flags: dict[str, Any], freed: int
) -> None:
    assert taken(GEMMA, **flags).host.weights == GEMMA.tensor_bytes - freed


def test_a_draft_takes_its_own_weights_cache_and_buffers() -> None:
    alone = MemoryInputs(GEMMA, {"ctx-size": 4096, "parallel": 1}, engine())
    found = estimate(replace(alone, draft=model()))
    cache = 4096 * 23040
    assert found.host.draft > model().tensor_bytes + cache
    assert found.host.draft < (model().tensor_bytes + cache) * 1.15
    assert found.host.kv == estimate(alone).host.kv
    amx = replace(alone, draft=model(), cpu_flags=frozenset({"amx_int8"}))
    assert estimate(amx).host.draft == found.host.draft  # its copies replace the file's matrices
    locked = replace(amx, chosen={**amx.chosen, "load-mode": "mmap+mlock"})
    assert estimate(locked).host.draft == found.host.draft + 66_000_000


def test_drafted_tokens_need_more_rows_of_logits() -> None:
    plain, guessing = (
        taken(ctx_size=2048, parallel=2, kv_unified=False, spec_type=kind)
        for kind in ("none", "ngram-mod")
    )
    assert plain.host.compute / MIB == pytest.approx(14.51, rel=0.01)
    assert guessing.host.compute / MIB == pytest.approx(26.07, rel=0.01)


def test_older_builds_reserve_logits_for_a_whole_batch() -> None:
    found = taken(on=engine("b6324"), ctx_size=4096, parallel=1)
    assert found.host.compute > 512 * model().vocab_size * 4


def test_without_options_the_engines_own_defaults_count() -> None:
    # Four slots that share the context the model was trained for.
    assert taken() == taken(ctx_size=8192, parallel=4, kv_unified=True)
    assert taken(ctx_size="x", parallel="y") == taken(kv_unified=False)


# Devices


def test_all_layers_go_to_a_device_that_holds_them() -> None:
    found = taken(on=engine("b10434", GPU), ctx_size=4096, parallel=1)
    (take,) = found.devices.values()
    assert found.layers_offloaded == 31
    assert found.host.kv == 0
    assert take.kv == 4096 * 23040
    # The embeddings stay, and are copied because they serve as output too.
    assert found.host.weights == model().embedding_bytes
    assert take.weights == model().tensor_bytes
    assert found.host.compute < take.compute


def test_two_devices_share_by_memory_and_have_a_compute_buffer_each() -> None:
    one = taken(on=engine("b10434", GPU), ctx_size=4096).devices["Vulkan0"]
    two = taken(on=engine("b10434", GPU, SECOND), ctx_size=4096).devices
    # The engine gives 16 of 30 layers to the first one, and 14 with the output to the second.
    assert (two["Vulkan0"].kv, two["Vulkan1"].kv) == (one.kv * 16 // 30, one.kv * 14 // 30)
    assert two["Vulkan0"].compute == one.compute


def test_only_the_configured_devices_are_used() -> None:
    on = engine("b10434", GPU, SECOND)
    assert list(taken(on=on, device="Vulkan1").devices) == ["Vulkan1"]


def test_a_number_of_layers_can_be_offloaded() -> None:
    on = engine("b10434", GPU)
    found = taken(on=on, ctx_size=4096, parallel=1, gpu_layers=11)
    assert found.layers_offloaded == 11
    assert found.devices["Vulkan0"].kv == 10 * 4096 * 768
    assert found.host.kv == 20 * 4096 * 768
    # Without layers too, large batches are computed there.
    none = taken(on=on, gpu_layers=0).devices["Vulkan0"]
    assert none.total == none.compute > 0
    assert taken(on=on, gpu_layers=0, op_offload=False).devices == {}
    two = engine("b10434", GPU, replace(GPU, name="Vulkan1"))
    assert taken(on=two, gpu_layers=0).devices.keys() == {"Vulkan0"}
    assert taken(on=on, gpu_layers="all").layers_offloaded == 31
    kept = taken(on=on, ctx_size=4096, gpu_layers="all", kv_offload=False)
    assert kept.devices["Vulkan0"].kv == 0


def test_layers_beyond_a_devices_memory_stay_in_main_memory() -> None:
    large = model(tensor_bytes=40 * GIB, embedding_bytes=GIB)
    found = taken(large, engine("b10434", GPU), ctx_size=4096)
    assert 0 < found.layers_offloaded < 31
    assert found.devices["Vulkan0"].total <= 23 * GIB
    assert taken(large, engine("b10434", replace(GPU, total_mib=512))).devices == {}


def test_a_device_has_room_for_a_copy_of_a_tensor_in_main_memory() -> None:
    large, on = model(tensor_bytes=8 * GIB, embedding_bytes=GIB), engine("b10434", GPU)
    (_, each) = large.tensors[-1]
    copied, alone = (
        taken(large, on, ctx_size=4096, gpu_layers=11, op_offload=offloads).devices["Vulkan0"]
        for offloads in (True, False)
    )
    assert copied.compute > each > alone.compute
    assert taken(large, on, ctx_size=4096, gpu_layers="all").devices["Vulkan0"].compute < each


def test_each_of_two_devices_keeps_a_margin_unless_the_split_is_given() -> None:
    large = model(tensor_bytes=40 * GIB, embedding_bytes=GIB)
    on, margin_mib = engine("b10434", GPU, SECOND), GPU.total_mib // 3
    assert taken(large, on).layers_offloaded == 31
    assert taken(large, on, fit_target=margin_mib).layers_offloaded < 31
    assert taken(large, on, fit_target=margin_mib, tensor_split="1,1").layers_offloaded == 31


def test_with_a_device_the_host_repacks_nothing() -> None:
    assert taken(GEMMA, engine("b10434", GPU), gpu_layers=3).host.copies == 0


def test_a_draft_and_a_projector_go_where_the_layers_go() -> None:
    memory_inputs = MemoryInputs(
        GEMMA, {"ctx-size": 4096}, engine(), draft=model(), projector_bytes=5
    )
    here, there = (
        estimate(memory_inputs),
        estimate(replace(memory_inputs, engine=engine("b10434", GPU))),
    )
    assert here.host.projector == 5
    assert there.host.draft == there.host.projector == 0
    assert there.devices["Vulkan0"].draft == here.host.draft
    assert there.devices["Vulkan0"].projector == 5
