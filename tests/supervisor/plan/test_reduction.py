"""The reductions after running out of memory: their order and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.samples import GPU, engine, model

from supervisor.builds.help import FlagValue
from supervisor.plan.estimate import Estimate, MemoryInputs, estimate
from supervisor.plan.shortage import Kind, next_reduction

NOTHING: frozenset[str] = frozenset()


def on_device(**flags: Any) -> MemoryInputs:
    chosen: dict[str, FlagValue] = {
        "parallel": 4,
        "kv-unified": False,
        "ctx-size": 32768,
        "gpu-layers": "all",
        "cache-type-k": "f16",
        "cache-type-v": "f16",
    }
    chosen |= {key.replace("_", "-"): value for key, value in flags.items()}
    return MemoryInputs(model(), chosen, engine("b10434", GPU))


def never(_: Estimate) -> bool:
    return False


def ladder(
    asked: MemoryInputs, own: frozenset[str] = NOTHING
) -> dict[Kind, Mapping[str, FlagValue]]:
    """Return all reductions by kind, in their order."""
    found: dict[Kind, Mapping[str, FlagValue]] = {}
    while reduction := next_reduction(asked, found, own, never):
        kind, flags = reduction
        found[kind] = flags
        asked = asked.with_flags(flags)
    return found


def test_a_shorter_context_a_quantised_cache_and_fewer_layers_are_tried_once_each() -> None:
    assert list(ladder(on_device()).items()) == [
        ("context", {"ctx-size": 16384}),
        ("cache", {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}),
        ("layers", {"gpu-layers": 15}),
    ]


def test_what_the_user_set_is_never_changed() -> None:
    assert list(ladder(on_device(), frozenset({"ctx-size"}))) == [
        "cache",
        "layers",
    ]
    kept = frozenset({"ctx-size", "cache-type-v", "gpu-layers"})
    assert ladder(on_device(), kept) == {}


def test_a_quantised_cache_is_no_second_time_quantised() -> None:
    asked = on_device(cache_type_k="q8_0", cache_type_v="q8_0")
    assert list(ladder(asked)) == ["context", "layers"]


def test_of_one_kind_the_least_that_suffices_is_given_up() -> None:
    asked = on_device()
    third = estimate(asked.with_flags({"ctx-size": 8192})).devices["Vulkan0"].at_start
    found = next_reduction(
        asked, (), NOTHING, lambda request: request.devices["Vulkan0"].at_start > third
    )
    assert found
    assert found[1] == {"ctx-size": 8192}


def test_where_nothing_suffices_all_of_it_is_given_up() -> None:
    found = next_reduction(on_device(), (), NOTHING, lambda _: True)
    assert found
    assert found[1] == {"ctx-size": 2048}
    layers = next_reduction(on_device(), ("context", "cache"), NOTHING, lambda _: True)
    assert layers
    assert layers[1] == {"gpu-layers": 0}


def test_without_a_device_there_are_no_layers_to_take_from_it() -> None:
    asked = MemoryInputs(model(), {"ctx-size": 8192, "cache-type-k": "q8_0"}, engine())
    assert "layers" not in list(ladder(asked))
