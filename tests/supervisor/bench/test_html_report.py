import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.bench.html_report import axis_over

_VALUES = st.lists(st.floats(0, 1e12).filter(lambda x: x == 0 or x > 1e-9), min_size=1, max_size=9)


@given(_VALUES)
def test_all_values_lie_on_the_axis_in_order(values: list[float]) -> None:
    axis = axis_over(values, 10, 350)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 350 for place in places)
    assert axis.low <= min(values) <= max(values) <= axis.high


@given(_VALUES)
@example([1e12, 999999999999.9999])
def test_ticks_are_few_and_distinct(values: list[float]) -> None:
    axis = axis_over(values, 10, 350)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 6
    assert len({text for _, text in ticks}) == len(ticks)
    assert all(10 <= axis.position(value) <= 350 for value, _ in ticks)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([82, 115], ["90", "100", "110"]),
        ([3, 100], ["0", "50", "100"]),
        ([0.61, 0.84], ["0.6", "0.7", "0.8"]),
        ([5, 5], ["4.8", "4.9", "5.0", "5.1", "5.2"]),
        ([0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round(values: list[float], ticks: list[str]) -> None:
    assert [text for _, text in axis_over(values, 10, 350).ticks()] == ticks
