"""What models and instances are, in the shapes of `wire`. Pure."""

from __future__ import annotations

from supervisor.admission.model_state import Waiting
from supervisor.control.messages import (
    DraftStatus,
    ErrorFields,
    InstanceStatus,
    ModelStatus,
    ReloadReport,
    SavedSlot,
    WaitStatus,
    WarmedInstance,
)
from supervisor.engines.spec_types import spec_types
from supervisor.flags.plan import Plan
from supervisor.fleet.availability import availability
from supervisor.fleet.cache_commands import PrefilledInstance
from supervisor.fleet.model import Model
from supervisor.fleet.stats import EngineStats
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.process.exit_cause import FailureCause
from supervisor.reload.reload import ReloadFailure, ReloadResult
from supervisor.slot_store.manifest import Manifest


def model_status(
    model: Model, instances: list[InstanceStatus], waiting: Waiting | None
) -> ModelStatus:
    """Return a model with its instances; context and slots are known once it was planned."""
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
        "waiting": _wait(waiting) if waiting else None,
        "not_persisted_reason": next(
            (one.keeper.reason for one in model.all_replicas if one.plan), None
        ),
        "instances": instances,
    }


def _wait(waiting: Waiting) -> WaitStatus:
    return {
        "place": waiting.place,
        "requests": waiting.requests,
        "wait_s": waiting.wait_s,
        "leaving": list(waiting.leaving),
    }


def instance_status(
    facts: InstanceSnapshot,
    plan: Plan | None,
    stats: EngineStats,
    slots_busy: int,
    *,
    is_leaving: bool,
) -> InstanceStatus:
    """Return an instance; what only a living process has is None without one."""
    endpoint = facts.endpoint
    return {
        "name": facts.name,
        "state": facts.state.value,
        "leaving": is_leaving,
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
        "log": str(facts.log_path) if facts.log_path else None,
        # Why one that is meant to be down once fell is no trouble any more.
        "error": _error(facts, facts.cause) if facts.cause and facts.wanted else None,
        "warnings": [f"{warning.sentence}: {warning.hint}" for warning in facts.warnings],
        "draft": _draft(stats) if plan and spec_types(plan.memory_inputs.chosen) else None,
    }


def _draft(stats: EngineStats) -> DraftStatus:
    return {
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "acceptance": stats.acceptance,
    }


def _error(facts: InstanceSnapshot, cause: FailureCause) -> ErrorFields:
    return {
        "code": cause.code,
        "message": cause.sentence,
        "hint": cause.hint,
        "log": str(facts.log_path) if facts.log_path else None,
    }


def saved_slot(one: Manifest) -> SavedSlot:
    """Return a conversation that is kept."""
    return {
        "name": one.name,
        "model": one.model,
        "replica": one.replica,
        "tokens": one.tokens,
        "size_bytes": one.size_bytes,
        "saved_at": one.saved_at.isoformat(timespec="seconds"),
    }


def warmed_instance(one: PrefilledInstance) -> WarmedInstance:
    """Return an instance that has read a prompt."""
    return {"instance": one.instance, "tokens": one.tokens, "cached": one.cached_tokens}


def reload_report(done: ReloadResult) -> ReloadReport:
    """Return what came of a reload."""
    places = done.difference
    return {
        "added": [str(place) for place in places.added],
        "removed": [str(place) for place in places.removed],
        "changed": [str(place) for place in places.changed],
        "kept": [str(place) for place in places.kept],
        "notes": list(done.notes),
        "failures": [_failure(failure) for failure in done.failures],
    }


def _failure(failure: ReloadFailure) -> ErrorFields:
    return {
        "code": failure.cause.code if failure.cause else "start_failed",
        "message": str(failure),
        "hint": failure.cause.hint if failure.cause else None,
        "log": str(failure.log_path) if failure.log_path else None,
    }
