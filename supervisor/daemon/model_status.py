"""Builds control messages about models, instances, workers, balances and captures. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from proxy.router.batch_queue import BatchQueueStats
from proxy.router.lease import InstanceStats
from supervisor.autoscale.layer_mover import Moved
from supervisor.builds.help import spec_types
from supervisor.daemon import control_messages as messages
from supervisor.daemon.trial_status import error_fields, instance_error, trial_note
from supervisor.engine.states import InstanceSnapshot
from supervisor.fleet.model import Model, availability
from supervisor.fleet.reload import ReloadResult
from supervisor.fleet.stats import EngineStats
from supervisor.loading.decide import ModelState, Waiting
from supervisor.plan.plan import Plan
from supervisor.plan.setting import SettingsByFlag
from supervisor.rpc import balance
from supervisor.rpc.address import KnownWorkers, WorkerAddress
from supervisor.rpc.model_workers import address_of
from supervisor.rpc.pool import WorkerPool
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.worker import Worker
from supervisor.settings.schema import Settings
from supervisor.slot_store.manifest import Manifest

if TYPE_CHECKING:
    from supervisor.experiments.capture import Recording


def model_status(  # noqa: PLR0913 (a status is made of all these)
    model: Model,
    instances: list[messages.InstanceStatus],
    waiting: Waiting | None,
    loaded: ModelState | None,
    *,
    changed: Mapping[str, Any],
    drafts: SettingsByFlag,
    is_reachable: bool,
) -> messages.ModelStatus:
    """Build the status; `is_reachable`: whether other machines can send requests.

    `drafts` has the adapted value of `spec-type` with its present reason, if there is one.
    """
    plan, (state, reason) = model.plan, availability(model)
    return messages.ModelStatus(
        name=model.entry.name,
        state=state,
        reason=reason,
        preload=model.residency.preload,
        aliases=list(model.entry.aliases),
        path=str(model.entry.path),
        profile=model.entry.profile,
        slots=plan.slots if plan else 0,
        ctx_size=plan.ctx_size if plan else None,
        waiting=_waiting(waiting) if waiting else None,
        idle=_idle(loaded) if loaded else None,
        not_persisted_reason=not_persisted_reason(model),
        chats=not (plan and plan.embedding and plan.embedding.is_only),
        changed={**changed},
        engine_tools=("network" if is_reachable else "local") if model.entry.runs_tools else "off",
        adapted=_adapted_values({**plan.adapted, **drafts} if plan else {}),
        reduced=_adapted_values(plan.reduced if plan else {}),
        trial=trial_note(model),
        instances=instances,
    )


def not_persisted_reason(model: Model) -> str | None:
    """Return why slots of a model are not saved; None if they are, or before the first run."""
    return next((replica.slots.reason for replica in model.all_replicas if replica.plan), None)


def _waiting(waiting: Waiting) -> messages.WaitStatus:
    return messages.WaitStatus.of(waiting, rule=str(waiting.rule) if waiting.rule else None)


def _idle(loaded: ModelState) -> messages.IdleStatus:
    return messages.IdleStatus(
        limit_s=_finite(loaded.idle_limit_s),
        unload_in_s=_finite(loaded.unload_in_s),
        origin="keep_alive" if loaded.follows_request else "ttl_s",
    )


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else max(0.0, seconds)


def _adapted_values(settings: SettingsByFlag) -> list[messages.AdaptedValue]:
    return [messages.AdaptedValue.of(setting, key=key) for key, setting in settings.items()]


def instance_status(
    facts: InstanceSnapshot,
    plan: Plan | None,
    stats: EngineStats,
    slots_busy: int,
    *,
    is_retiring: bool,
) -> messages.InstanceStatus:
    endpoint, draft = facts.endpoint, plan.memory_inputs.draft if plan else None
    return messages.InstanceStatus.of(
        facts,
        state=facts.state.value,
        retiring=is_retiring,
        up_s=facts.up_s or None,
        progress=facts.load_progress,
        slots=plan.slots if plan else 0,
        slots_busy=slots_busy,
        tokens_per_second=stats.tokens_per_second,
        memory_bytes=stats.memory_bytes if facts.pid else None,
        address=str(endpoint.socket or f"{endpoint.host}:{endpoint.port}"),
        engine=str(plan.engine.path) if plan else None,
        log=str(facts.log_path) if facts.log_path else None,
        error=instance_error(facts),
        warnings=[
            *((*plan.lost_workers, *plan.missing_draft, *plan.tuned) if plan and facts.pid else ()),
            *(f"{warning.sentence}: {warning.hint}" for warning in facts.warnings),
        ],
        draft=messages.DraftStatus(
            stats.drafted_tokens,
            stats.accepted_tokens,
            stats.acceptance,
            path=str(draft.path) if draft else None,
        )
        if plan and spec_types(plan.memory_inputs.chosen)
        else None,
    )


def weight_statuses(instances: Iterable[InstanceStats]) -> list[messages.WeightStatus]:
    serving = [instance for instance in instances if instance.in_service]
    counts = Counter(instance.upstream.model for instance in serving)
    return [
        messages.WeightStatus(
            instance=instance.upstream.name,
            model=instance.upstream.model,
            weight=round(instance.weight.value, 3),
            reason=instance.weight.reason,
        )
        for instance in serving
        if counts[instance.upstream.model] > 1
    ]


def batch_statuses(stats: Mapping[str, BatchQueueStats]) -> list[messages.BatchQueueStatus]:
    used = sorted((model, queue) for model, queue in stats.items() if queue.total_queued)
    return [messages.BatchQueueStatus(model, **asdict(queue)) for model, queue in used]


def saved_slot(manifest: Manifest) -> messages.SavedSlot:
    saved_at = manifest.saved_at.isoformat(timespec="seconds")
    return messages.SavedSlot.of(manifest, saved_at=saved_at, encrypted=bool(manifest.key_id))


def reload_report(result: ReloadResult) -> messages.ReloadReport:
    replicas = ("added", "removed", "changed", "kept")
    return messages.ReloadReport(
        **{name: [*map(str, getattr(result.difference, name))] for name in replicas},
        notes=list(result.notes),
        failures=[
            error_fields(failure.cause, str(failure), failure.log_path)
            for failure in result.failures
        ],
    )


def worker_statuses(
    settings: Settings, known: KnownWorkers, pool: WorkerPool
) -> list[messages.WorkerStatus]:
    return [
        _worker_status(
            address_of(name, worker_settings, known),
            [model for model, its in settings.models.items() if name in its.workers],
            known,
            pool.worker(name),
        )
        for name, worker_settings in settings.workers.items()
    ]


def _worker_status(
    address: WorkerAddress, models: list[str], known: KnownWorkers, local: Worker | None
) -> messages.WorkerStatus:
    devices, problem = known.devices(address), known.problem(address)
    found = messages.WorkerStatus(
        name=address.name,
        address=str(address),
        local=local is not None,
        state="lost" if problem else "ready" if devices else "unknown",
        reason=problem,
        hint=None,
        pid=None,
        restarts=0,
        devices_bytes=[device.total_mib * 1024**2 for device in devices],
        models=models,
    )
    if local:
        found.state, found.pid, found.restarts = local.state, local.pid, local.restarts
        found.reason = local.cause.sentence if local.cause else None
        found.hint = local.cause.hint if local.cause else None
    return found


def balance_status(
    model: str, instance: str, run: ShardRun, now_s: float
) -> messages.BalanceStatus:
    """Return the measurements of a run; `now_s` is the event loop's time."""
    decision = run.balancer.advice()
    moves = decision if isinstance(decision, balance.Rebalance) else None
    return messages.BalanceStatus(
        model=model,
        instance=instance,
        decision=_DECISIONS[type(decision)],
        reason=decision.reason,
        estimated_speedup=moves.estimated_speedup if moves else None,
        bottleneck_speedup=moves.bottleneck_speedup if moves else None,
        shards=list(_shards(run, moves, now_s)),
    )


def moved_layers(moved: Moved) -> messages.MovedLayers:
    name, move, path = moved
    before, after = dict(move.current_assignments), dict(move.suggested_assignments)
    return messages.MovedLayers.of(move, model=name, before=before, after=after, file=str(path))


_DECISIONS: Final[Mapping[type[balance.RebalanceDecision], str]] = {
    balance.Balanced: "balanced",
    balance.InsufficientData: "insufficient_data",
    balance.Rebalance: "rebalance",
}


def _shards(
    run: ShardRun, moves: balance.Rebalance | None, now_s: float
) -> Iterator[messages.ShardStatus]:
    suggested = dict(moves.suggested_assignments) if moves else {}
    for plan, metrics in zip(run.plans, run.balancer.metrics.values(), strict=True):
        yield messages.ShardStatus.of(
            metrics,
            has_output=plan.more_layers > 0,
            layers_max=plan.layers_max,
            suggested_layers=suggested.get(metrics.shard_name),
            min_latency_us=metrics.min_latency_us if metrics.total_forwards else None,
            last_update=_time_of(metrics, now_s),
        )


def _time_of(metrics: balance.ShardMetrics, now_s: float) -> str | None:
    if metrics.last_update is None:
        return None
    at = datetime.now(tz=UTC) - timedelta(seconds=now_s - metrics.last_update)
    return at.isoformat(timespec="milliseconds")


def capture_status(running: Recording | None) -> messages.CaptureStatus | None:
    if running is None:
        return None
    return messages.CaptureStatus.of(running, left_s=round(running.left_s, 1), **running.counts)
