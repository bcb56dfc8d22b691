"""Canaries as control messages. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from supervisor.canary.canary import Canary, EndedCanary
from supervisor.control.trial_messages import CanaryStatus, EndedCanaryStatus, TrialStatus
from supervisor.fleet.model import Model
from supervisor.trial.trials import replicas_by_side


def canary_status(
    canary: Canary, left_s: float | None, model: Model | None, trial: TrialStatus | None
) -> CanaryStatus:
    request = canary.request
    return {
        "model": request.model,
        "engine": str(request.engine),
        "own_engine": _own_engine(model) if model else None,
        "share": request.share,
        "margin": request.margin,
        "decides_in_s": left_s,
        "obstacle": canary.obstacle,
        "trial": trial,
    }


def ended_canary_status(ended: EndedCanary) -> EndedCanaryStatus:
    return cast("EndedCanaryStatus", asdict(ended))


def _own_engine(model: Model) -> str | None:
    plans = (one.plan for one in replicas_by_side(model)["base"])
    return next((str(plan.engine.path) for plan in plans if plan), None)
