"""States of models, loaded and requested, for the decisions about loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.loading.decide import ModelState


def loaded(name: str, **others: Any) -> ModelState:
    resting = ModelState(
        name, "loaded", required={"host": 4}, resident_s=60.0, idle_s=30.0, reload_cost_s=1.0
    )
    return replace(resting, **others)


def requested(name: str, waited_s: float = 0.0, **others: Any) -> ModelState:
    claim = ModelState(name, "down", required={"host": 4}, waiting=1, oldest_wait_s=waited_s)
    return replace(claim, **others)
