"""How often a node is polled."""

import pytest

from proxy.nodes.monitor import pause_s


@pytest.mark.parametrize(
    ("failures", "wait_s"), [(0, 5), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10**6, 60)]
)
def test_polls_of_a_failing_node_back_off(failures: int, wait_s: float) -> None:
    assert pause_s(failures, 0.5) == pytest.approx(wait_s)
    assert pause_s(failures, 0.0) == pytest.approx(0.9 * wait_s)
    assert pause_s(failures, 1.0) == pytest.approx(1.1 * wait_s)
