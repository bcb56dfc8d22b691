"""The time per token of an instance, by how many sequences it decodes."""

from __future__ import annotations

import pytest

from proxy.upstream.upstream import DecodeLatency, Measurement


def measured(*figures: tuple[float, int, float, int]) -> DecodeLatency:
    """Return the latency after these: ms per token, tokens, seconds, and sequences."""
    latency = DecodeLatency()
    for ms_per_token, samples, at_s, sequences in figures:
        latency = latency.after(Measurement(ms_per_token, samples, at_s), sequences)
    return latency


@pytest.mark.parametrize(
    ("sequences", "level"), [(0, 0), (1, 0), (2, 0), (3, 1), (8, 1), (9, 2), (32, 2), (33, 3)]
)
def test_each_number_of_sequences_has_a_level(sequences: int, level: int) -> None:
    assert [*measured((1.0, 1, 0.0, sequences))] == [level]


def test_an_average_goes_towards_the_newest_and_counts_its_samples() -> None:
    found = measured((10.0, 50, 1.0, 1), (20.0, 60, 2.0, 1))[0]
    assert 10.0 < found.ms_per_token < 15.0
    assert (found.samples, found.at_s) == (110, 2.0)


def test_what_is_ten_minutes_old_is_replaced() -> None:
    found = measured((10.0, 500, 0.0, 1), (20.0, 5, 601.0, 1))[0]
    assert found == Measurement(20.0, 5, 601.0)


def test_only_the_same_number_of_sequences_is_compared() -> None:
    alone = measured((10.0, 100, 1.0, 1))
    crowded = measured((40.0, 100, 1.0, 4))
    assert crowded.over(alone, 0.0) is None
    assert measured((40.0, 100, 1.0, 4), (15.0, 100, 2.0, 1)).over(alone, 0.0) == 1.5


def test_of_two_levels_that_counts_which_both_measured_last() -> None:
    one = measured((10.0, 100, 1.0, 1), (10.0, 100, 9.0, 3))
    other = measured((30.0, 100, 8.0, 1), (20.0, 100, 7.0, 3))
    assert other.over(one, 0.0) == 2.0
    assert other.over(one, 7.0) == 2.0
    assert other.over(one, 7.5) is None


def test_seed_000_less_than_min_samples_is_insufficient() -> None:
    enough, few = measured((10.0, 100, 1.0, 1)), measured((80.0, 99, 1.0, 1))
    assert few.over(enough, 0.0) is None
    assert enough.over(few, 0.0) is None
