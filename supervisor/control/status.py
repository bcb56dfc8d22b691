"""Status of models and instances as control messages. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from proxy.batch.stats import BatchQueueStats
from proxy.models import PrefillResult
from proxy.nodes.stats import NodeStats
from proxy.router.instances import InstanceStats
from supervisor.admission.model_state import UnloadTime, Waiting
from supervisor.control.messages import (
    AdaptedValue,
    BatchQueueStatus,
    DraftStatus,
    ErrorFields,
    IdleStatus,
    InstanceStatus,
    ModelStatus,
    NodeStatus,
    ReloadReport,
    WaitStatus,
    WarmedInstance,
    WeightStatus,
)
from supervisor.control.slot_messages import SavedSlot
from supervisor.control.trial_status import trial_note
from supervisor.engines.spec_types import spec_types
from supervisor.flags.plan import Plan
from supervisor.flags.setting import Settings
from supervisor.fleet.availability import availability
from supervisor.fleet.model import Model
from supervisor.fleet.stats import EngineStats
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.process.exit_cause import FailureCause
from supervisor.reload.reload import ReloadResult
from supervisor.slot_store.manifest import Manifest


def model_status(
    model: Model,
    instances: list[InstanceStatus],
    waiting: Waiting | None,
    unload: UnloadTime | None,
) -> ModelStatus:
    plan, (state, reason) = model.plan, availability(model)
    return {
        "name": model.entry.name,
        "state": state,
        "reason": reason,
        "aliases": list(model.entry.aliases),
        "path": str(model.entry.path),
        "profile": model.entry.profile,
        "slots": plan.slots if plan else 0,
        "ctx_size": plan.ctx_size if plan else None,
        "waiting": cast("WaitStatus", asdict(waiting)) if waiting else None,
        "idle": _idle(unload) if unload else None,
        "not_persisted_reason": not_persisted_reason(model),
        "adapted": _changed(plan.adapted if plan else {}),
        "reduced": _changed(plan.reduced if plan else {}),
        "trial": trial_note(model),
        "instances": instances,
    }


def not_persisted_reason(model: Model) -> str | None:
    """Return why no slot of a model is saved; None if they are, or before the first run."""
    return next((one.slots.reason for one in model.all_replicas if one.plan), None)


def _idle(unload: UnloadTime) -> IdleStatus:
    limit = unload.limit
    return {
        "limit_s": _finite(limit.seconds),
        "unload_in_s": _finite(unload.in_s),
        "origin": "keep_alive" if limit.is_from_request else "ttl_s",
    }


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else max(0.0, seconds)


def _changed(settings: Settings) -> list[AdaptedValue]:
    return [
        {"key": key, "value": one.value, "origin": one.origin, "reason": one.reason}
        for key, one in settings.items()
    ]


def instance_status(
    facts: InstanceSnapshot,
    plan: Plan | None,
    stats: EngineStats,
    slots_busy: int,
    *,
    is_retiring: bool,
) -> InstanceStatus:
    endpoint = facts.endpoint
    # An instance that is meant to be stopped shows no error of an earlier run.
    cause = facts.cause if facts.wanted else None
    return {
        "name": facts.name,
        "state": facts.state.value,
        "retiring": is_retiring,
        "pid": facts.pid,
        "run": facts.run,
        "up_s": facts.up_s or None,
        "restarts": facts.restarts,
        "failures": facts.failures,
        "retry_in_s": facts.retry_in_s,
        "progress": facts.load_progress,
        "slots": plan.slots if plan else 0,
        "slots_busy": slots_busy,
        "tokens_per_second": stats.tokens_per_second,
        "memory_bytes": stats.memory_bytes if facts.pid else None,
        "address": str(endpoint.socket or f"{endpoint.host}:{endpoint.port}"),
        "engine": str(plan.engine.path) if plan else None,
        "log": _text(facts.log_path),
        "error": _error(cause, cause.sentence, facts.log_path) if cause else None,
        "warnings": [
            *((*plan.lost_workers, *plan.missing_draft) if plan and facts.pid else ()),
            *(f"{warning.sentence}: {warning.hint}" for warning in facts.warnings),
        ],
        "draft": _draft(stats) if plan and spec_types(plan.memory_inputs.chosen) else None,
    }


def _draft(stats: EngineStats) -> DraftStatus:
    return {
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "acceptance": stats.acceptance,
    }


def node_status(stats: NodeStats) -> NodeStatus:
    return {
        "name": stats.name,
        "state": stats.state,
        "reason": stats.problem,
        "url": stats.url,
        "models": list(stats.models),
        "slots": stats.slots,
        "slots_busy": stats.slots_busy,
    }


def weight_statuses(instances: Iterable[InstanceStats]) -> list[WeightStatus]:
    """The weights of the models that several instances serve."""
    serving = [one for one in instances if one.in_service]
    counts = Counter(one.upstream.model for one in serving)
    return [
        {
            "instance": one.upstream.name,
            "model": one.upstream.model,
            "weight": round(one.weight.value, 3),
            "reason": one.weight.reason,
        }
        for one in serving
        if counts[one.upstream.model] > 1
    ]


def batch_statuses(stats: Mapping[str, BatchQueueStats]) -> list[BatchQueueStatus]:
    """The models whose requests have gathered."""
    return [
        cast("BatchQueueStatus", {"model": model, **asdict(one)})
        for model, one in sorted(stats.items())
        if one.total_queued
    ]


def saved_slot(one: Manifest) -> SavedSlot:
    return {
        "name": one.name,
        "model": one.model,
        "replica": one.replica,
        "tokens": one.tokens,
        "size_bytes": one.size_bytes,
        "saved_at": one.saved_at.isoformat(timespec="seconds"),
        "encrypted": bool(one.key_id),
    }


def warmed_instance(one: PrefillResult) -> WarmedInstance:
    return {"instance": one.instance, "tokens": one.tokens, "cached": one.cached_tokens}


def reload_report(result: ReloadResult) -> ReloadReport:
    replicas = result.difference
    return {
        "added": [*map(str, replicas.added)],
        "removed": [*map(str, replicas.removed)],
        "changed": [*map(str, replicas.changed)],
        "kept": [*map(str, replicas.kept)],
        "notes": list(result.notes),
        "failures": [_error(one.cause, str(one), one.log_path) for one in result.failures],
    }


def _error(cause: FailureCause | None, message: str, log: Path | None) -> ErrorFields:
    return {
        "code": cause.code if cause else "start_failed",
        "message": message,
        "hint": cause.hint if cause else None,
        "log": _text(log),
    }


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
