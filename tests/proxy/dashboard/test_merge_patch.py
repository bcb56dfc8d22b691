"""A state and the patches after it give the next state."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.dashboard_client import applied

from proxy.dashboard.state import merge_patch

_VALUES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 1)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
_STATES = st.dictionaries(st.sampled_from("abc"), _VALUES, max_size=3)


@given(_STATES, _STATES)
def test_a_patch_makes_one_state_of_another(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    assert applied(before, patch) == after
    assert bool(patch) == (before != after)


def test_a_patch_has_only_the_changes() -> None:
    before = {"a": {"x": 1, "y": 2}, "b": [1], "c": 3}
    after = {"a": {"x": 1, "y": 5}, "b": [1, 2]}
    assert merge_patch(before, after) == {"a": {"y": 5}, "b": [1, 2], "c": None}
