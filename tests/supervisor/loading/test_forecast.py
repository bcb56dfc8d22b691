"""The models that a request would unload, if each takes 4 of 10."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.loading.decide import Actions, Eviction, ModelState, decide, eviction
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy

WAIT_S = 20.0
RULES = EvictionSettings(eviction_wait_s=WAIT_S)
DOWN = ModelState("new", "down", required={"host": 4})


def loaded(
    name: str, *, idle_s: float = 30.0, working: int = 0, is_pinned: bool = False
) -> ModelState:
    return ModelState(
        name,
        "loaded",
        ResidencyPolicy(pinned=is_pinned),
        {"host": 4},
        working=working,
        idle_s=idle_s,
        resident_s=60.0,
        reload_cost_s=1.0,
    )


def forecast(*models: ModelState) -> Eviction:
    def decided(states: Sequence[ModelState]) -> Actions:
        return decide(states, {"host": 10}, {"host": 10 - 4 * len(models)}, RULES)

    return eviction("new", (*models, DOWN), decided, WAIT_S)


def test_where_there_is_room_nothing_goes() -> None:
    assert forecast(loaded("a")) == Eviction()


def test_an_idle_model_goes_at_once() -> None:
    assert forecast(loaded("a", idle_s=5.0), loaded("b", idle_s=500.0)) == Eviction(("b",))


def test_a_working_model_goes_after_a_wait() -> None:
    found = forecast(loaded("a", working=1), loaded("b", working=1))
    assert len(found.models) == 1
    assert found.wait_s == WAIT_S


def test_what_never_leaves_is_the_reason_of_a_refusal() -> None:
    found = forecast(loaded("a", is_pinned=True), loaded("b", is_pinned=True))
    assert found.refusal == "there is no memory for it beside a, b, which no request for it unloads"
