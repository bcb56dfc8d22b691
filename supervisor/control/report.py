"""What models and instances are, in the shapes of `wire`. Pure."""

from __future__ import annotations

from supervisor.control.wire import (
    DraftStatus,
    ErrorFields,
    InstanceStatus,
    ModelStatus,
    ReloadReport,
    SavedSlot,
    WaitStatus,
    WarmedInstance,
)
from supervisor.fleet.caches import Warmed
from supervisor.fleet.drafting import advice
from supervisor.fleet.guest import Waiting
from supervisor.fleet.presence import availability
from supervisor.fleet.reload import Failure, Reloaded
from supervisor.fleet.replica import Model
from supervisor.fleet.slots.manifest import Manifest
from supervisor.fleet.vitals import Vital
from supervisor.life.diagnose import Cause
from supervisor.life.draft import Drafts
from supervisor.life.facts import InstanceFacts
from supervisor.profile.plan import Plan


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
        "unkept": next((one.keeper.reason for one in model.everyone if one.plan), None),
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
    facts: InstanceFacts, plan: Plan | None, vital: Vital, slots_busy: int, *, is_leaving: bool
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
        "faults": facts.faults,
        "retry_in_s": facts.retry_in_s,
        "progress": facts.load_progress,
        "slots": plan.slots if plan else 0,
        "slots_busy": slots_busy,
        "tokens_per_second": vital.tokens_per_second,
        "memory_bytes": vital.memory_bytes if facts.pid else None,
        "address": str(endpoint.socket or f"{endpoint.host}:{endpoint.port}"),
        "log": str(facts.log_path) if facts.log_path else None,
        # Why one that is meant to be down once fell is no trouble any more.
        "error": _error(facts, facts.cause) if facts.cause and facts.wanted else None,
        "warnings": [f"{warning.sentence}: {warning.hint}" for warning in facts.warnings],
        "draft": _draft(plan, facts.drafts) if plan and facts.drafts else None,
    }


def _draft(plan: Plan, drafts: Drafts) -> DraftStatus:
    verdict = drafts.verdict
    trouble, cure = (verdict and advice(plan, verdict)) or (None, None)
    return {
        "drafted": drafts.tokens.drafted,
        "accepted": drafts.tokens.accepted,
        "acceptance": drafts.tokens.acceptance,
        "with_tps": verdict.with_tps if verdict else None,
        "without_tps": verdict.without_tps if verdict else None,
        "estimate": verdict.is_estimate if verdict else False,
        "trouble": trouble,
        "cure": cure,
    }


def _error(facts: InstanceFacts, cause: Cause) -> ErrorFields:
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


def warmed_instance(one: Warmed) -> WarmedInstance:
    """Return an instance that has read a prompt."""
    return {"instance": one.instance, "tokens": one.tokens, "cached": one.cached_tokens}


def reload_report(done: Reloaded) -> ReloadReport:
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


def _failure(failure: Failure) -> ErrorFields:
    return {
        "code": failure.cause.code if failure.cause else "start_failed",
        "message": str(failure),
        "hint": failure.cause.hint if failure.cause else None,
        "log": str(failure.log_path) if failure.log_path else None,
    }
