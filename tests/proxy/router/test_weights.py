"""Weights of instances of unequal speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.router.lease import EQUAL, Speed, Weight
from proxy.router.registry import weights_of
from proxy.upstream.upstream import UNMEASURED, DecodeLatency, Measurement


def speed(ms_per_token: float, samples: int = 100, at_s: float = 0.0) -> Speed:
    return DecodeLatency({0: Measurement(ms_per_token, samples, at_s)}), None


def values(*speeds: Speed) -> list[float]:
    return [round(weight.value, 3) for weight in weights_of(speeds)]


@pytest.mark.parametrize(
    ("latencies_ms", "expected"),
    [
        ([10.0, 40.0], [1.6, 0.4]),
        ([40.0, 10.0], [0.4, 1.6]),
        ([10.0, 10.0, 40.0], [1.333, 1.333, 0.333]),
        ([10.0, 20.0, 40.0], [1.714, 0.857, 0.429]),
    ],
)
def test_seed_000_weights_are_in_inverse_proportion_to_the_latency(
    latencies_ms: list[float], expected: list[float]
) -> None:
    weights = weights_of([speed(latency_ms) for latency_ms in latencies_ms])
    assert [round(weight.value, 3) for weight in weights] == expected
    assert {weight.reason for weight in weights} == {"measured"}


def test_seed_000_below_the_threshold_all_are_equal() -> None:
    assert weights_of([speed(10.0), speed(20.0)]) == [EQUAL, EQUAL]
    assert values(speed(10.0), speed(20.1)) != [1.0, 1.0]


def test_seed_000_with_insufficient_data_all_are_equal() -> None:
    assert weights_of([speed(10.0), speed(80.0, samples=99)]) == [EQUAL, EQUAL]
    assert weights_of([]) == []
    assert weights_of([(UNMEASURED, None), (UNMEASURED, None)]) == [EQUAL, EQUAL]


def test_one_that_was_not_measured_counts_as_an_average_one() -> None:
    weights = weights_of([speed(10.0), (UNMEASURED, None), speed(40.0)])
    assert weights == [Weight(1.6, "measured"), EQUAL, Weight(0.4, "measured")]


def test_one_that_was_not_measured_for_ten_minutes_has_recovered() -> None:
    assert values(speed(10.0, at_s=600.0), speed(40.0)) == [1.6, 0.4]
    assert values(speed(10.0, at_s=601.0), speed(40.0)) == [1.0, 1.0]


def test_a_pause_of_all_of_them_changes_nothing() -> None:
    assert values(speed(10.0, at_s=9000.0), speed(40.0, at_s=9000.0)) == [1.6, 0.4]


def test_a_weight_of_the_settings_holds_and_changes_no_other() -> None:
    given_weight = (UNMEASURED, 0.25)
    assert weights_of([speed(10.0), given_weight]) == [EQUAL, Weight(0.25, "set")]
    weights = weights_of([speed(10.0), given_weight, speed(40.0)])
    assert weights == [Weight(1.6, "measured"), Weight(0.25, "set"), Weight(0.4, "measured")]


speeds = st.lists(
    st.builds(
        speed,
        st.floats(0.01, 10_000),
        st.integers(0, 300),
        st.sampled_from([0.0, 300.0, 900.0]),
    ),
    min_size=1,
    max_size=6,
)
latencies = st.lists(st.floats(0.01, 10_000), min_size=2, max_size=6)


@given(speeds)
def test_weights_average_one_and_none_starves(found: list[Speed]) -> None:
    weights = weights_of(found)
    largest = max(weight.value for weight in weights)
    # A weight is raised to the smallest share, never lowered.
    assert len(found) <= sum(weight.value for weight in weights) * (1 + 1e-9)
    assert min(weight.value for weight in weights) >= largest / 16 * (1 - 1e-9)
    assert sum(weight.value for weight in weights) <= len(found) * (1 + 6 / 16)


@given(latencies)
def test_a_faster_one_has_no_smaller_weight(latencies_ms: list[float]) -> None:
    weights = weights_of([speed(latency_ms) for latency_ms in latencies_ms])
    by_latency = sorted(
        zip(latencies_ms, weights, strict=True), key=lambda latency_ms: latency_ms[0]
    )
    in_order = [weight.value for _, weight in by_latency]
    assert in_order == sorted(in_order, reverse=True)


@given(latencies, st.randoms(use_true_random=False))
def test_the_order_of_instances_changes_nothing(latencies_ms: list[float], random: object) -> None:
    order = list(range(len(latencies_ms)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = values(*(speed(latency_ms) for latency_ms in latencies_ms))
    shuffled = values(*(speed(latencies_ms[at]) for at in order))
    assert shuffled == pytest.approx([straight[at] for at in order], abs=0.002)
