"""Memory of a device that other programs take, and that returns after an unload."""

from supervisor.loading.decide import Actions, ModelState, decide
from supervisor.loading.memory_usage import observe
from supervisor.settings.schema import EvictionSettings

TOTAL = {"Vulkan0": 24}
RULES = EvictionSettings()


def test_what_is_neither_free_nor_ours_is_taken_by_others() -> None:
    found = observe({}, TOTAL, {"Vulkan0": 10}, {"Vulkan0": 8}, may_grow=False)
    assert found == ({"Vulkan0": 6}, {})


def test_an_estimate_above_the_truth_takes_nothing_from_others() -> None:
    found = observe({}, TOTAL, {"Vulkan0": 20}, {"Vulkan0": 8}, may_grow=False)
    assert found == ({"Vulkan0": 0}, {})


def test_memory_that_returns_late_after_an_unload_is_awaited_until_a_limit() -> None:
    taken, returning = observe({"Vulkan0": 6}, TOTAL, {"Vulkan0": 10}, {}, may_grow=True)
    assert (taken, returning) == ({"Vulkan0": 6}, {"Vulkan0": 8})
    later = observe(taken, TOTAL, {"Vulkan0": 18}, {}, may_grow=True)
    assert later == ({"Vulkan0": 6}, {"Vulkan0": 0})
    late = observe(taken, TOTAL, {"Vulkan0": 10}, {}, may_grow=False)
    assert late == ({"Vulkan0": 14}, {})


def test_memory_that_comes_back_is_awaited_and_nothing_is_unloaded_for_it() -> None:
    idle = ModelState("a", "loaded", required={"Vulkan0": 6}, resident_s=60, idle_s=60)
    wanted = ModelState("b", "down", required={"Vulkan0": 12}, waiting=1)
    free, soon = {"Vulkan0": 4}, {"Vulkan0": 8}
    assert decide([idle, wanted], TOTAL, free, RULES, soon) == Actions(look_again_s=0.25)
    assert decide([idle, wanted], TOTAL, free, RULES).unload == {}
    less = {"Vulkan0": 3}
    assert decide([idle, wanted], TOTAL, free, RULES, less).unload == {"a": "b needs its memory"}
