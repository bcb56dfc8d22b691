"""The output of `corral balance`."""

from __future__ import annotations

from supervisor.cli.start import render
from supervisor.daemon.model_status import balance_status
from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.shards import ShardPlan
from supervisor.settings.tables import LoadBalanceConfig


def measured(*latencies_us: int, times: int = 1) -> ShardRun:
    """Return a run of shards with 8 layers each, the last of which has an output like 2 more."""
    last = len(latencies_us) - 1
    plans = [
        ShardPlan(WorkerAddress(name, "127.0.0.1", 1), 8, 2.0 * (number == last), 99)
        for number, name in enumerate("abc"[: len(latencies_us)])
    ]
    found = ShardRun(plans, LoadBalanceConfig(min_samples=1))
    found.close()
    for plan, latency_us in zip(plans, latencies_us, strict=True):
        for _ in range(times):
            found.balancer.record(plan.worker.name, latency_us)
    return found


def shown(run: ShardRun) -> str:
    return render(balance_status("chat", "chat.0", run, 0.0))


def test_advice_is_shown_with_both_splits() -> None:
    """seed 000"""
    text = shown(measured(800, 10_000))
    assert text.startswith("chat.0: per-layer latency ratio 10.00 exceeds threshold 2.00; moving")
    rows = [line.split() for line in text.splitlines()[3:]]
    assert rows[0][:3] + rows[0][-1:] == ["a", "8", "1", "15"]
    assert rows[1][:3] + rows[1][-1:] == ["b", "8+out", "1", "1"]


def test_without_measurements_it_names_the_missing_ones() -> None:
    """seed 000"""
    text = shown(measured(800, 10_000, times=0))
    assert text.startswith("chat.0: not enough data: a was measured 0 times, less than 1")


def test_balanced_workers_are_called_that() -> None:
    """seed 000"""
    assert shown(measured(800, 1000)).startswith("chat.0: balanced: the slowest shard takes 1.00")


def test_the_status_has_every_field_of_the_metrics() -> None:
    """seed 000"""
    run = measured(800, 10_000)
    (first, _) = balance_status("chat", "chat.0", run, 0.0).shards
    found = run.balancer.metrics["a"]
    for name in ("shard_name", "layer_count", "total_forwards", "total_latency_us"):
        assert getattr(first, name) == getattr(found, name)
    for name in ("min", "max", "last", "avg"):
        assert getattr(first, f"{name}_latency_us") == 800
    assert first.avg_latency_per_layer_us == 100
    assert first.last_update
