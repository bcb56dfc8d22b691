"""Rules beyond the seed: order, exact totals, at least one layer, memory, and small gains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.rpc.balance import (
    Balanced,
    Rebalance,
    ShardMetrics,
    decide,
    suggested_layers,
)
from supervisor.rpc.shards import apportion
from supervisor.settings.tables import LoadBalanceConfig

CONFIG = LoadBalanceConfig(min_samples=1)


def shard(
    name: str, layers: int, latency_us: int, more_layers: float = 0.0, most: int = 2**31
) -> ShardMetrics:
    metrics = ShardMetrics(name, layers, more_layers=more_layers, layers_max=most)
    metrics.record(latency_us)
    return metrics


def suggested(*shards: ShardMetrics) -> tuple[int, ...]:
    found = decide(shards, CONFIG)
    assert isinstance(found, Rebalance)
    assert [name for name, _ in found.suggested_assignments] == [
        shard.shard_name for shard in shards
    ]
    return tuple(count for _, count in found.suggested_assignments)


def test_shares_are_in_inverse_proportion_to_latency_per_layer() -> None:
    """seed 000"""
    assert suggested(shard("a", 15, 15_000), shard("b", 15, 60_000)) == (24, 6)
    assert suggested(shard("b", 15, 60_000), shard("a", 15, 15_000)) == (6, 24)


def test_a_slow_shard_keeps_one_layer() -> None:
    """seed 000: its rounding would give it none"""
    assert suggested(shard("a", 4, 400), shard("b", 4, 400_000)) == (7, 1)
    assert suggested(shard("a", 4, 400_000), shard("b", 4, 400), shard("c", 4, 400)) == (1, 6, 5)


def test_memory_limits_the_layers_of_a_shard() -> None:
    """seed 000: beyond it, `layers_max`"""
    fast, slow = shard("a", 15, 15_000, most=20), shard("b", 15, 60_000)
    assert suggested(fast, slow) == (20, 10)
    assert isinstance(decide([shard("a", 15, 15_000, most=3), slow], CONFIG), Balanced)


def test_a_gain_below_five_percent_moves_nothing() -> None:
    """seed 000: beyond it"""
    both = [shard("a", 29, 29_000), shard("b", 1, 2_500)]
    found = decide(both, CONFIG)
    assert isinstance(found, Balanced)
    assert found.reason == "moving layers would change the speed by -27.6 %"


def test_the_output_counts_as_the_layers_that_it_takes_as_long_as() -> None:
    """seed 000: the last shard computes the output too"""
    even = [shard("a", 15, 15_000), shard("b", 15, 23_000 * 2, more_layers=8)]
    assert isinstance(decide(even, CONFIG), Balanced)
    found = decide([shard("a", 15, 15_000), shard("b", 15, 92_000, more_layers=8)], CONFIG)
    assert isinstance(found, Rebalance)
    assert found.suggested_assignments == (("a", 29), ("b", 1))
    assert found.estimated_speedup == pytest.approx((15 + 92) / (29 + 4 * 9))


@st.composite
def shards(draw: st.DrawFn) -> list[ShardMetrics]:
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 100), st.integers(0, 10**6), st.integers(1, 200)),
            min_size=1,
            max_size=8,
        )
    )
    return [
        shard(str(number), layers, latency_us, most=most)
        for number, (layers, latency_us, most) in enumerate(rows)
    ]


@given(shards())
def test_any_suggestion_is_complete_and_within_limits(found: list[ShardMetrics]) -> None:
    """seed 000: exact total, at least one layer each, memory, and the same answer again"""
    if not any(entry.avg_latency_per_layer_us for entry in found):
        return
    layers = suggested_layers(found)
    assert sum(layers) == sum(entry.layer_count for entry in found)
    assert all(count >= 1 for count in layers)
    assert all(
        count <= max(entry.layer_count, entry.layers_max)
        for count, entry in zip(layers, found, strict=True)
    )
    assert layers == suggested_layers(found)


@given(shards())
def test_any_suggestion_is_worth_a_reload(found: list[ShardMetrics]) -> None:
    """seed 000: no move for under 5 %"""
    decision = decide(found, CONFIG)
    if isinstance(decision, Rebalance):
        assert decision.estimated_speedup >= 1.05


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ((1.5, 1.5), (2, 1)),  # of equal remainders, the first
        ((2.4, 0.6), (2, 1)),
        ((2.9, 0.1), (2, 1)),  # at least one
        ((1.2, 1.4, 0.4), (1, 1, 1)),
    ],
)
def test_largest_remainders(quotas: Sequence[float], expected: tuple[int, ...]) -> None:
    assert apportion(3, [(quota, 1, 100) for quota in quotas]) == expected


def test_limits_that_do_not_allow_the_total_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 cannot be divided"):
        apportion(5, [(2.5, 1, 2), (2.5, 1, 2)])
