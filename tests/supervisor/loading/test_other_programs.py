"""Memory of a device that other programs take, that they need, and that returns after an unload."""

from dataclasses import replace
from typing import Any

from supervisor.loading.decide import Actions, ModelState, OtherPrograms, decide, give_way
from supervisor.loading.memory_usage import needed_by_others, observe
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy

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


def test_growth_beyond_the_noise_of_estimates_needs_memory() -> None:
    total = {"Vulkan0": 1000, "Vulkan1": 1000}
    assert needed_by_others({"Vulkan0": 110, "Vulkan1": 0}, {"Vulkan0": 100}, total) == set()
    assert needed_by_others({"Vulkan0": 111, "Vulkan1": 0}, {"Vulkan0": 100}, total) == {"Vulkan0"}
    assert needed_by_others({"Vulkan1": 11}, {}, total) == {"Vulkan1"}


def on_device(name: str, idle_s: float = 60, **others: Any) -> ModelState:
    required = {"host": 1, "Vulkan0": 6}
    return ModelState(
        name, "loaded", required=required, resident_s=60, idle_s=idle_s, reload_cost_s=1, **others
    )


OLD, NEW = on_device("old", idle_s=600), on_device("new")
BUSY = on_device("busy", idle_s=0, working=1)


def yielded(free: int, *models: ModelState, may_pause: bool = False, returning: int = 0) -> Actions:
    """Decide while other programs need Vulkan0; `free` is what is free beyond the reserve."""
    others = OtherPrograms(frozenset({"Vulkan0"}), may_pause=may_pause)
    memory = {"host": 9, "Vulkan0": free}
    return give_way(Actions(), models, memory, {"Vulkan0": returning}, others)


def test_no_more_models_give_way_than_the_reserve_needs() -> None:
    reason = "other programs need memory of Vulkan0"
    found = yielded(-1, NEW, OLD)
    assert (found.unload, found.give_way) == ({"old": reason}, ("old",))
    assert yielded(-7, NEW, OLD).give_way == ("old", "new")
    assert yielded(0, NEW, OLD) == Actions()


def test_too_little_is_better_than_nothing() -> None:
    assert yielded(-20, NEW, OLD).give_way == ("new", "old")


def test_a_model_that_was_just_loaded_stays_if_others_are_not_enough() -> None:
    assert yielded(-20, NEW, replace(OLD, resident_s=0.0)).give_way == ("new",)


def test_a_model_that_is_unloaded_anyway_does_not_give_way() -> None:
    others = OtherPrograms(frozenset({"Vulkan0"}), may_pause=False)
    unloaded = Actions(unload={"old": "b needs its memory"})
    found = give_way(unloaded, (NEW, OLD), {"Vulkan0": -7}, {}, others)
    assert (found.give_way, found.unload["old"]) == (("new",), "b needs its memory")


def test_memory_that_is_on_its_way_is_not_given_twice() -> None:
    leaving = ModelState("leaving", "unloading", required={"Vulkan0": 6})
    assert yielded(-1, OLD, leaving) == Actions()
    assert yielded(-1, OLD, returning=6) == Actions()


def test_these_do_not_give_way() -> None:
    pinned = on_device("pinned", residency=ResidencyPolicy(pinned=True))
    on_host = ModelState("host", "loaded", required={"host": 6}, resident_s=60, idle_s=60)
    asked = on_device("asked", waiting=1)
    assert yielded(-1, pinned, on_host, asked, BUSY) == Actions()


def test_busy_models_give_way_after_idle_ones_and_their_answers() -> None:
    found = yielded(-7, BUSY, OLD, may_pause=True)
    assert (found.pause, found.give_way) == (("busy",), ("old",))
    # An idle model goes first even if its conversations cost more to compute again.
    costly = on_device("costly", idle_s=1, cached_tokens=9_000)
    assert yielded(-1, BUSY, costly, may_pause=True).give_way == ("costly",)
    done = on_device("busy", idle_s=0, waiting=1, is_paused=True)
    assert yielded(-1, done, OLD, may_pause=True).give_way == ("busy",)
