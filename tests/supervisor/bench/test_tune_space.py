from __future__ import annotations

from dataclasses import replace

import pytest
from support.samples import flags

from supervisor.bench.tune_space import GoalName, Situation, Variant, candidates, combine_variants
from supervisor.builds.help import newest_flags

HERE = Situation(
    chosen={
        "threads": 8,
        "threads-batch": 8,
        "batch-size": 512,
        "ubatch-size": 512,
        "cache-type-k": "f16",
        "cache-type-v": "f16",
        "flash-attn": "on",
        "load-mode": "mmap+mlock",
        "parallel": 4,
        "ctx-size": 32768,
    },
    flags=flags("b10434"),
    physical_cores=8,
    logical_cores=16,
    slots=4,
    ctx_slot=8192,
    layers=30,
)


def values(found: tuple[Variant, ...], key: str) -> list[object]:
    return [dict(entry.flags)[key] for entry in found if key in dict(entry.flags)]


def test_threads_stay_within_the_machine() -> None:
    found = candidates("latency", HERE)
    assert values(found, "threads") == [16, 7, 6, 4]
    alone = candidates("latency", replace(HERE, physical_cores=1, logical_cores=1))
    assert set(values(alone, "threads")) == {1}


@pytest.mark.parametrize("goal", ["latency", "throughput", "memory"])
def test_every_candidate_changes_something_once(goal: GoalName) -> None:
    found = candidates(goal, HERE)
    assert len(found) == len(set(found))
    for entry in found:
        assert dict(entry.flags).items() - HERE.chosen.items()


def test_what_the_build_lacks_is_not_tried() -> None:
    old = candidates("latency", replace(HERE, flags=flags("b8954")))
    new = candidates("latency", HERE)
    assert values(new, "load-mode")
    assert set(old) < set(new)


def test_slots_keep_their_context() -> None:
    found = [
        dict(candidate.flags)
        for candidate in candidates("throughput", HERE)
        if candidate.axes == {"slots"}
    ]
    assert found == [
        {"parallel": 8, "ctx-size": 65536},
        {"parallel": 16, "ctx-size": 131072},
        {"parallel": 32, "ctx-size": 262144},
    ]


def test_instances_share_the_cores_and_the_slots() -> None:
    two, four = [candidate for candidate in candidates("throughput", HERE) if candidate.replicas]
    assert dict(two.flags)["threads"] == 4
    assert (dict(four.flags)["parallel"], four.replicas) == (1, 4)
    assert two.name.endswith("2 instances")


def test_layers_and_devices_are_tried_if_there_are_devices() -> None:
    assert not values(candidates("latency", HERE), "gpu-layers")
    two = candidates("latency", replace(HERE, devices=("Vulkan0", "Vulkan1")))
    assert values(two, "gpu-layers") == [0, 15, 999]
    assert values(two, "device") == ["Vulkan0", "Vulkan1"]


def test_experts_are_placed_if_there_are_devices() -> None:
    here = replace(HERE, devices=("Vulkan0",), flags=flags("b11434"))
    assert not values(candidates("latency", here), "n-cpu-moe")
    assert not values(candidates("latency", replace(HERE, experts_kept=7)), "n-cpu-moe")
    moe = replace(here, experts_kept=7)
    assert values(candidates("latency", moe), "n-cpu-moe") == [7, 10, 30]
    assert values(candidates("latency", replace(here, experts_kept=30)), "n-cpu-moe") == [30]
    newer = candidates("throughput", replace(moe, flags=newest_flags()))
    assert values(newer, "moe-cache-mib") == [2048, 8192]


def test_drafting_is_tried_with_a_draft_model_only() -> None:
    assert "draft-simple" not in values(candidates("latency", HERE), "spec-type")
    found = candidates("latency", replace(HERE, draft_type="draft-simple"))
    assert values(found, "spec-draft-n-max") == [3, 8, 16]
    heads = candidates("latency", replace(HERE, draft_type="draft-mtp"))
    assert values(heads, "spec-draft-n-max") == [2, 4, 8]
    assert "draft-mtp" in values(heads, "spec-type")


def test_variants_of_one_axis_are_not_combined() -> None:
    found = candidates("throughput", HERE)
    threads = [entry for entry in found if entry.axes == {"threads"}]
    poll = next(entry for entry in found if entry.axes == {"poll"})
    two = next(entry for entry in found if entry.replicas)
    assert combine_variants(threads[:2]) is None
    assert combine_variants([threads[0], two]) is None
    both = combine_variants([two, poll])
    assert both
    assert both.replicas == 2
    assert both.name == f"{two.name.removesuffix(', 2 instances')}, poll 0, 2 instances"
