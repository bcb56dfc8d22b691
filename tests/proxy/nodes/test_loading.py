"""A node that refused to load a model is asked again ever more rarely."""

import pytest

from proxy.nodes.loading import LoadRefusals, retry_delay_s


@pytest.mark.parametrize(("count", "wait_s"), [(1, 30), (2, 60), (5, 480), (6, 600), (10**6, 600)])
def test_the_time_doubles_up_to_ten_minutes(count: int, wait_s: float) -> None:
    assert retry_delay_s(count) == wait_s


def test_a_refusal_holds_for_its_time_for_one_model_of_one_node() -> None:
    now_s = 0.0
    refusals = LoadRefusals(lambda: now_s)
    refusals.add("one", "chat", "no room")
    assert refusals.reason("one", "chat") == "no room"
    assert refusals.reason("two", "chat") is refusals.reason("one", "other") is None
    now_s = 31.0
    assert refusals.reason("one", "chat") is None
    refusals.add("one", "chat", "still no room")
    now_s = 31.0 + 59.0
    assert refusals.reason("one", "chat") == "still no room"
    refusals.forget("one", "chat")
    refusals.add("one", "chat", "no room")
    now_s += 31.0
    assert refusals.reason("one", "chat") is None


def test_refusals_are_bounded() -> None:
    refusals = LoadRefusals(lambda: 0.0, max_count=2)
    for node in ("one", "two", "three"):
        refusals.add(node, "chat", "no room")
    assert [refusals.reason(node, "chat") for node in ("one", "two", "three")] == [
        *(None, "no room", "no room")
    ]
