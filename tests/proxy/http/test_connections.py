"""The limit of connections, and which one is closed for a new one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import Unavailable
from proxy.http.connections import Connections, limit_of


def filled(limit: int, busy: int = 0, idle: int = 0) -> Connections[int]:
    """`limit` connections: first busy ones, then idle ones, then new ones."""
    connections = Connections[int](limit)
    for number in range(limit):
        connections.add(number)
    for number in range(busy + idle):
        connections.begin(number)
    for number in range(busy, busy + idle):
        connections.end(number)
    return connections


def test_the_oldest_new_connection_is_closed_first() -> None:
    connections = filled(4, busy=1)
    assert [connections.add(number) for number in (4, 5, 6)] == [1, 2, 3]
    assert len(connections) == 4


def test_an_idle_connection_is_closed_while_few_are_new() -> None:
    connections = filled(8, busy=2, idle=5)
    assert [connections.add(8), connections.add(9)] == [2, 3]
    assert connections.add(10) == 7  # more than a quarter is new now


def test_the_longest_idle_connection_is_closed_first() -> None:
    connections = filled(4, idle=4)
    connections.begin(0)
    connections.end(0)
    assert connections.add(4) == 1


def test_a_busy_connection_is_never_closed() -> None:
    connections = filled(4, busy=4)
    with pytest.raises(Unavailable, match="max_connections"):
        connections.add(4)
    connections.end(0)
    assert connections.add(4) == 0


def test_a_removed_connection_does_not_count() -> None:
    connections = filled(2, busy=2)
    connections.remove(0)
    assert connections.add(2) is None
    connections.begin(0)
    connections.end(0)
    assert len(connections) == 2


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("abe r"), st.integers(0, 20))))
def test_the_limit_is_never_exceeded(limit: int, steps: list[tuple[str, int]]) -> None:
    connections, busy = Connections[int](limit), set[int]()
    for step, expected in steps:
        match step:
            case "a" if expected not in busy:
                connections.remove(expected)
                try:
                    assert connections.add(expected) not in busy
                except Unavailable:
                    assert len(busy) == limit
            case "b":
                connections.begin(expected)
            case "e":
                connections.end(expected)
            case "r":
                connections.remove(expected)
        busy = {number for number in range(21) if connections.is_busy(number)}
        assert len(connections) <= limit


@pytest.mark.parametrize(
    ("wanted", "descriptors", "limit"),
    [
        (None, 1024, 384),
        (None, 65_536, 1024),
        (5000, 65_536, 5000),
        (5000, 1024, 384),
        (10, 1024, 10),
        (None, 64, 8),
    ],
)
def test_limit_leaves_two_descriptors_each_and_a_reserve(
    wanted: int | None, descriptors: int, limit: int
) -> None:
    assert limit_of(wanted, descriptors) == limit
