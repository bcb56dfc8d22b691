"""Instances and models as the dashboard shows them. Pure."""

from __future__ import annotations

import math
from typing import Final

from proxy.dashboard.host import HostInstance, HostModel
from supervisor.admission.model_state import UnloadTime, Waiting
from supervisor.engines.discover import Engine
from supervisor.fleet.model import Model, Replica
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State

_FAILING: Final = frozenset({State.BACKOFF, State.FAILED, State.UNHEALTHY, State.STARTING})


def host_model(model: Model, waiting: Waiting | None, unload: UnloadTime | None) -> HostModel:
    return HostModel(
        profile=model.entry.profile,
        unload_in_s=unload.in_s if unload and math.isfinite(unload.in_s) else None,
        place=waiting.place if waiting else None,
        leaving=waiting.leaving if waiting else (),
    )


def host_instance(
    replica: Replica, facts: InstanceSnapshot, rss_bytes: int | None, *, is_retiring: bool
) -> HostInstance:
    engine = replica.plan.engine if replica.plan else None
    return HostInstance(
        name=facts.name,
        model=facts.model,
        state=facts.state.value,
        since_s=facts.since_s,
        run=facts.run,
        restarts=facts.restarts,
        is_retiring=is_retiring,
        pid=facts.pid,
        rss_bytes=rss_bytes,
        retry_in_s=facts.retry_in_s,
        load_progress=facts.load_progress if facts.state is State.STARTING else None,
        engine=_build(engine) if engine else None,
        error=_error(facts),
        warnings=tuple(f"{one.sentence}: {one.hint}" for one in facts.warnings),
    )


def _build(engine: Engine) -> str:
    return engine.name or (f"b{engine.build}" if engine.build else engine.version)


def _error(facts: InstanceSnapshot) -> dict[str, str] | None:
    """Why it does not serve. One that is meant to be stopped shows no error of an earlier run."""
    if (cause := facts.cause) is None or not facts.wanted or facts.state not in _FAILING:
        return None
    return {"code": cause.code, "message": cause.sentence, "hint": cause.hint}
