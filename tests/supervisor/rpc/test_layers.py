"""Which layers a split gives to each device."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from supervisor.plan.placement import layer_owners
from supervisor.rpc.shards import split_for


def layer_counts(split: Sequence[float], layers: int) -> tuple[int, ...]:
    owners = layer_owners(split, layers)[:-1]  # without the output
    return tuple(owners.count(at) for at in range(len(split)))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_a_split_made_for_layers_gives_them(layers: list[int]) -> None:
    assert layer_counts(split_for(layers), sum(layers)) == tuple(layers)
    assert layer_owners(split_for(layers), sum(layers))[-1] == len(layers) - 1


def test_shares_that_are_no_layers() -> None:
    """As build 10434 loads SmolLM2, 30 layers and the output, over two workers."""
    assert layer_counts((1, 2), 30) == (11, 19)
    assert layer_counts((1, 1), 30) == (16, 14)
    assert layer_counts((0, 1, 0), 30) == (0, 30, 0)
    assert layer_owners((1, 1, 0), 30)[-1] == 1


def test_of_few_layers_on_devices_the_last_ones_are_there() -> None:
    assert layer_owners((1, 1), 30, 5) == (0, 0, 0, 1, 1)
    assert layer_owners((1, 1), 30, 99) == layer_owners((1, 1), 30)
