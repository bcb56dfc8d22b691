"""Whether a model can fit, and the suggestions if not."""

from __future__ import annotations

from typing import Any

import pytest
from support.samples import GIB, GPU, engine, machine, model

from supervisor.errors import OutOfMemory
from supervisor.plan.estimate import MemoryInputs, estimate
from supervisor.plan.fit import MemoryCapacity, capacity, check_fits, misfit_reason, suggestions

HAS = MemoryCapacity(4 * GIB, {})


def memory_inputs(of: Any = None, on: Any = None, **flags: Any) -> MemoryInputs:
    chosen = {"parallel": 4, "kv-unified": False, "cache-ram": 0}
    chosen |= {key.replace("_", "-"): value for key, value in flags.items()}
    return MemoryInputs(of or model(), chosen, on or engine())


def test_models_may_use_the_budget_or_all_but_a_reserve() -> None:
    assert capacity(machine(memory_bytes=20 * GIB), ()).host == 19 * GIB
    assert capacity(machine(memory_bytes=20 * GIB), (), 5 * GIB).host == 5 * GIB
    assert capacity(machine(memory_bytes=20 * GIB), (), 50 * GIB).host == 20 * GIB
    assert capacity(machine(), (GPU,)).devices == {"Vulkan0": 24 * GIB}


def test_a_model_that_fits_is_accepted() -> None:
    check_fits("chat", memory_inputs(ctx_size=8192), HAS)


def test_a_full_prompt_cache_does_not_count() -> None:
    assert misfit_reason(estimate(memory_inputs(ctx_size=8192, cache_ram=99_999)), HAS) is None


def test_a_model_that_cannot_fit_is_rejected_with_suggestions() -> None:
    with pytest.raises(OutOfMemory) as caught:
        check_fits("chat", memory_inputs(ctx_size=262144), HAS)
    assert caught.value.message.startswith("chat can never fit: it needs 5.8 GiB of main memory")
    assert caught.value.message.endswith("models may use 4.0 GiB")
    hint = caught.value.hint
    assert hint
    assert "parallel = 2, ctx-size = 131072" in hint
    assert "cache-type-k = q8_0, cache-type-v = q8_0" in hint
    assert "ctx-size = 131072" in hint


def test_every_suggestion_is_the_largest_that_fits() -> None:
    asked = memory_inputs(ctx_size=262144)
    fewer, smaller, shorter = suggestions(asked, HAS)
    for remedy in (fewer, smaller, shorter):
        assert remedy[1] <= HAS.host
    assert fewer[0] == {"parallel": 2, "ctx-size": 131072}
    assert smaller[0]["cache-type-v"] == "q8_0"
    assert shorter[0] == {"ctx-size": 131072}
    larger = memory_inputs(ctx_size=262144, parallel=3)
    assert misfit_reason(estimate(larger), HAS)


def test_slots_that_share_a_context_do_not_divide_it() -> None:
    asked = memory_inputs(ctx_size=262144, kv_unified=True, parallel=3)
    assert suggestions(asked, HAS)[-1][0] == {"ctx-size": 131072}
    guessing = memory_inputs(ctx_size=8192, kv_unified=True, parallel=99, spec_type="ngram-mod")
    fewer = suggestions(guessing, MemoryCapacity(GIB // 2, {}))[0][0]
    assert (fewer["parallel"], fewer["ctx-size"]) == (15, 8192)


def test_changes_are_combined_if_no_single_one_suffices() -> None:
    (remedy,) = suggestions(memory_inputs(ctx_size=262144), MemoryCapacity(180 * 1024**2, {}))
    assert remedy[0] == {
        "cache-type-k": "q8_0",
        "cache-type-v": "q8_0",
        "parallel": 1,
        "ctx-size": 2048,
    }


def test_a_smaller_cache_is_suggested_only_where_possible() -> None:
    for asked, has in (
        (memory_inputs(ctx_size=262144, flash_attn="off"), MemoryCapacity(5 * GIB, {})),
        (memory_inputs(model(key_length=80), ctx_size=262144), HAS),
        (memory_inputs(ctx_size=524288, cache_type_k="q8_0", cache_type_v="q8_0"), HAS),
    ):
        assert not [flags for flags, _ in suggestions(asked, has) if "cache-type-k" in flags]


def test_weights_that_are_too_large_have_no_suggestion() -> None:
    with pytest.raises(OutOfMemory) as caught:
        check_fits("chat", memory_inputs(model(tensor_bytes=5 * GIB), ctx_size=8192), HAS)
    assert caught.value.hint
    assert "a smaller model" in caught.value.hint


def test_explicitly_offloaded_layers_must_fit_on_the_device() -> None:
    large = model(tensor_bytes=40 * GIB, embedding_bytes=GIB)
    on = engine("b10434", GPU)
    has = MemoryCapacity(64 * GIB, {"Vulkan0": 24 * GIB})
    assert misfit_reason(estimate(memory_inputs(large, on)), has) is None
    reason = misfit_reason(estimate(memory_inputs(large, on, gpu_layers="all")), has)
    assert reason
    assert "of Vulkan0, which has 24.0 GiB" in reason
