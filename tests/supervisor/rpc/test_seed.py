"""Every item of seed 000: metrics of shards, configuration, decisions of the load balancer."""

from __future__ import annotations

import time

import pytest

from supervisor.rpc.balance import Balanced, InsufficientData, LoadBalancer, Rebalance, ShardMetrics
from supervisor.settings.tables import LoadBalanceConfig


def balancer(min_samples: int, *, interval_s: int = 0) -> LoadBalancer:
    config = LoadBalanceConfig(
        min_samples=min_samples, imbalance_threshold=2.0, eval_interval_secs=interval_s
    )
    return LoadBalancer(config)


def measured(first: tuple[str, int], second: tuple[str, int], times: int) -> LoadBalancer:
    """Return a balancer of two shards with 8 layers, measured with these latencies."""
    found = balancer(10)
    found.register_shards([(first[0], 8), (second[0], 8)])
    for _ in range(times):
        found.record(*first)
        found.record(*second)
    return found


# The seed's seven tests, by their names there.


def test_shard_metrics_recording() -> None:
    """seed 000"""
    found = ShardMetrics("s1", 8)
    for latency_us in (100, 200, 150):
        found.record(latency_us)
    assert found.total_forwards == 3
    assert found.total_latency_us == 450
    assert found.min_latency_us == 100
    assert found.max_latency_us == 200
    assert found.avg_latency_us == 150


def test_shard_metrics_per_layer() -> None:
    """seed 000"""
    found = ShardMetrics("s1", 8)
    found.record(800)
    found.record(800)
    assert found.avg_latency_us == 800
    assert found.avg_latency_per_layer_us == 100


def test_load_balance_config_defaults() -> None:
    """seed 000"""
    config = LoadBalanceConfig()
    assert config.min_samples == 100
    assert config.imbalance_threshold == 2.0
    assert config.eval_interval_secs == 60


def test_evaluate_balanced() -> None:
    """seed 000"""
    assert isinstance(measured(("a", 800), ("b", 900), 20).evaluate(), Balanced)


def test_evaluate_imbalanced() -> None:
    """seed 000"""
    assert isinstance(measured(("fast", 80), ("slow", 8000), 20).evaluate(), Rebalance)


def test_evaluate_insufficient_data() -> None:
    """seed 000"""
    found = balancer(100)
    found.register_shards([("a", 8), ("b", 8)])
    for _ in range(10):
        found.record("a", 800)
        found.record("b", 8000)
    assert isinstance(found.evaluate(), InsufficientData)


def test_rebalance_suggestion_distributes_inversely() -> None:
    """seed 000"""
    found = measured(("fast", 80), ("slow", 800), 100).evaluate()
    assert isinstance(found, Rebalance)
    layers = dict(found.suggested_assignments)
    assert layers["fast"] > layers["slow"]


# The seed's other items.


def test_new_metrics_have_the_seeds_fields_and_defaults() -> None:
    """seed 000: ShardMetrics::new"""
    found = ShardMetrics("s1", 8)
    assert (found.shard_name, found.layer_count) == ("s1", 8)
    assert (found.total_forwards, found.total_latency_us) == (0, 0)
    assert (found.min_latency_us, found.max_latency_us) == (2**64 - 1, 0)
    assert (found.last_latency_us, found.last_update) == (0, None)
    assert (found.avg_latency_us, found.avg_latency_per_layer_us) == (0, 0)


def test_the_latest_record_is_kept_with_its_time() -> None:
    """seed 000: last_latency_us, last_update"""
    found, before_s = ShardMetrics("s1", 8), time.monotonic()
    found.record(5)
    found.record(7)
    assert found.last_latency_us == 7
    assert found.last_update is not None
    assert before_s <= found.last_update <= time.monotonic()


def test_a_shard_without_layers_has_no_latency_per_layer() -> None:
    """seed 000: avg_latency_per_layer_us"""
    found = ShardMetrics("s1", 0)
    found.record(10)
    assert found.avg_latency_per_layer_us == 0


def test_the_output_counts_as_layers_in_all_figures() -> None:
    """`corral balance` shows the latency per layer that decides."""
    found = ShardMetrics("s1", 8, more_layers=2.0)
    found.record(1000)
    assert found.avg_latency_per_layer_us == 100


def test_forgetting_measurements_keeps_the_layers_of_a_shard() -> None:
    """seed 000: reset"""
    found = balancer(1)
    found.register_shards([("a", 8)], {"a": 2.0})
    found.reset()
    found.record("a", 1000)
    assert found.metrics["a"].avg_latency_per_layer_us == 100


def test_without_shards_there_is_not_enough_data() -> None:
    """seed 000: evaluate"""
    assert isinstance(balancer(10).evaluate(), InsufficientData)


def test_one_shard_below_min_samples_is_not_enough() -> None:
    """seed 000: evaluate"""
    found = measured(("fast", 80), ("slow", 8000), 9)
    found.record("fast", 80)
    assert isinstance(found.evaluate(), InsufficientData)
    found.record("slow", 8000)
    assert isinstance(found.evaluate(), Rebalance)


def test_a_ratio_at_the_threshold_is_balanced() -> None:
    """seed 000: `ratio <= imbalance_threshold`"""
    assert isinstance(measured(("a", 800), ("b", 1600), 20).evaluate(), Balanced)
    assert isinstance(measured(("a", 800), ("b", 1608), 20).evaluate(), Rebalance)


def test_within_the_interval_it_is_balanced() -> None:
    """seed 000: eval_interval_secs"""
    now_s = [100.0]
    config = LoadBalanceConfig(min_samples=1, eval_interval_secs=60)
    found = LoadBalancer(config, clock=lambda: now_s[0])
    found.register_shards([("fast", 8), ("slow", 8)])
    assert isinstance(found.evaluate(), InsufficientData)  # which is no evaluation
    found.record("fast", 80)
    found.record("slow", 8000)
    assert isinstance(found.evaluate(), Rebalance)
    now_s[0] += 59.9
    assert isinstance(found.evaluate(), Balanced)
    now_s[0] += 0.1
    assert isinstance(found.evaluate(), Rebalance)


def test_the_reason_and_both_assignments_are_given() -> None:
    """seed 000: RebalanceDecision::Rebalance"""
    found = measured(("fast", 80), ("slow", 800), 20).evaluate()
    assert isinstance(found, Rebalance)
    assert found.reason == "per-layer latency ratio 10.00 exceeds threshold 2.00"
    assert found.current_assignments == (("fast", 8), ("slow", 8))
    assert found.suggested_assignments == (("fast", 15), ("slow", 1))
    assert found.bottleneck_speedup == pytest.approx(800 / 150)  # the seed's number
    assert found.estimated_speedup == pytest.approx((80 + 800) / (150 + 100))


def test_shards_without_a_measurable_latency_are_balanced() -> None:
    """seed 000: latencies of zero are left out"""
    assert isinstance(measured(("a", 0), ("b", 0), 20).evaluate(), Balanced)


def test_an_unknown_shard_is_not_recorded() -> None:
    """seed 000: record, metrics, shard_metrics"""
    found = measured(("a", 1), ("b", 2), 3)
    found.record("c", 3)
    assert list(found.metrics) == ["a", "b"]
    assert found.shard_metrics("c") is None
    assert found.shard_metrics("b") is found.metrics["b"]


def test_reset_forgets_measurements_and_the_last_decision() -> None:
    """seed 000: reset"""
    found = balancer(1, interval_s=60)
    found.register_shards([("fast", 8), ("slow", 8)])
    for _ in range(2):
        found.record("fast", 80)
        found.record("slow", 8000)
        assert isinstance(found.evaluate(), Rebalance)
        found.reset()
        assert found.metrics["fast"] == ShardMetrics("fast", 8)
