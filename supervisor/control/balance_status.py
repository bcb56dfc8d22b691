"""Shards of split models as control messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from supervisor.adaptive.layer_mover import Moved
from supervisor.control.layer_messages import BalanceStatus, MovedLayers, ShardStatus
from supervisor.shards.balance import Balanced, InsufficientData, Rebalance, RebalanceDecision
from supervisor.shards.metrics import ShardMetrics
from supervisor.shards.run import ShardRun


def balance_status(model: str, instance: str, run: ShardRun, now_s: float) -> BalanceStatus:
    """Return the measurements of a run; `now_s` is monotonic."""
    decision = run.balancer.advice()
    moves = decision if isinstance(decision, Rebalance) else None
    return {
        "model": model,
        "instance": instance,
        "decision": _name(decision),
        "reason": decision.reason,
        "estimated_speedup": moves.estimated_speedup if moves else None,
        "bottleneck_speedup": moves.bottleneck_speedup if moves else None,
        "shards": list(_shards(run, moves, now_s)),
    }


def moved_layers(moved: Moved) -> MovedLayers:
    move = moved.move
    return {
        "model": moved.model,
        "before": dict(move.before),
        "after": dict(move.after),
        "reason": move.reason,
        "estimated_speedup": move.estimated_speedup,
        "file": str(moved.path),
    }


def _name(decision: RebalanceDecision) -> str:
    match decision:
        case Balanced():
            return "balanced"
        case InsufficientData():
            return "insufficient_data"
        case Rebalance():
            return "rebalance"


def _shards(run: ShardRun, moves: Rebalance | None, now_s: float) -> Iterator[ShardStatus]:
    suggested = dict(moves.suggested_assignments) if moves else {}
    for plan, metrics in zip(run.plans, run.balancer.metrics.values(), strict=True):
        yield {
            "shard_name": metrics.shard_name,
            "layer_count": metrics.layer_count,
            "has_output": plan.more_layers > 0,
            "layers_max": plan.layers_max,
            "suggested_layers": suggested.get(metrics.shard_name),
            "total_forwards": metrics.total_forwards,
            "total_latency_us": metrics.total_latency_us,
            "min_latency_us": metrics.min_latency_us if metrics.total_forwards else None,
            "max_latency_us": metrics.max_latency_us,
            "last_latency_us": metrics.last_latency_us,
            "last_update": _time_of(metrics, now_s),
            "avg_latency_us": metrics.avg_latency_us,
            "avg_latency_per_layer_us": metrics.avg_latency_per_layer_us,
        }


def _time_of(metrics: ShardMetrics, now_s: float) -> str | None:
    if metrics.last_update is None:
        return None
    at = datetime.now(tz=UTC) - timedelta(seconds=now_s - metrics.last_update)
    return at.isoformat(timespec="milliseconds")
