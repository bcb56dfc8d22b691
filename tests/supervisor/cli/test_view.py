"""Selecting, sorting and cancelling by keys."""

from dataclasses import replace
from typing import Any

from support.top_samples import STATUS, request

from proxy.observe.past import RequestStats
from supervisor.cli.top_view import Sample, View, handle_key, sort_requests, with_sample


def view(*ids: str, **changes: Any) -> View:
    return View(ids=ids, **changes)


def after(begun: View, *keys: str) -> View:
    for key in keys:
        begun, _ = handle_key(begun, key)
    return begun


def ids(requests: list[RequestStats]) -> str:
    return "".join(request.id for request in requests)


def test_requests_are_sorted_and_the_oldest_of_equal_ones_is_first() -> None:
    found = [
        request("a", age_s=1.0, model="x", tokens_per_second=5.0, phase="decode"),
        request("b", age_s=3.0, model="y", phase="queued"),
        request("c", age_s=2.0, model="x", tokens_per_second=9.0, phase="decode"),
        request("d", age_s=0.0, model=None, phase="reading"),
    ]
    assert ids(sort_requests(found, "age")) == "bcad"
    assert ids(sort_requests(found, "age", is_reversed=True)) == "dacb"
    assert ids(sort_requests(found, "model")) == "dcab"
    assert ids(sort_requests(found, "tokens/s")) == "cabd"
    assert ids(sort_requests(found, "phase")) == "dbca"


def test_a_key_sorts_and_the_same_key_reverses() -> None:
    assert (after(view(), "m").order, after(view(), "m").is_reversed) == ("model", False)
    assert after(view(), "m", "m").is_reversed
    assert not after(view(), "m", "m", "t").is_reversed


def test_keys_move_the_selection_within_the_list() -> None:
    three = view("a", "b", "c")
    assert after(three, "j").selected == "a"
    assert after(three, "k").selected == "c"
    assert after(three, "j", "down", "j", "j").selected == "c"
    assert after(three, "j", "page down", "up").selected == "b"
    assert after(three, "j", "escape").selected is None
    assert after(view(), "j").selected is None


def test_a_selection_stays_with_its_request_and_moves_on_when_that_ends() -> None:
    begun = view("a", "b", "c", selected="b")
    sorted_otherwise = Sample(
        STATUS, [request(entry, age_s=age) for entry, age in zip("cba", (9, 8, 7), strict=True)]
    )
    assert with_sample(begun, sorted_otherwise).selected == "b"
    ended = Sample(STATUS, [request("a", age_s=2), request("c", age_s=1)])
    assert with_sample(begun, ended).selected == "c"
    assert with_sample(begun, Sample(STATUS)).selected is None


def test_a_cancellation_is_asked_for_and_names_its_request() -> None:
    asked = after(view("a", "b"), "j", "x")
    assert asked.asking == "a"
    told, cancelled = handle_key(asked, "y")
    assert (cancelled, told.asking) == ("a", None)
    for key in ("n", "q", "escape", "j"):
        told, cancelled = handle_key(asked, key)
        assert (cancelled, told.asking, told.is_end) == (None, None, False)
    assert "select a request first" in after(view("a"), "x").note


def test_a_question_ends_with_its_request() -> None:
    asked = view("a", "b", selected="a", asking="a")
    found = with_sample(asked, Sample(STATUS, [request("b")]))
    assert (found.asking, found.note) == (None, "a has ended")


def test_a_daemon_that_was_started_again_is_told() -> None:
    first = with_sample(View(), Sample(STATUS))
    assert first.note == ""
    down = with_sample(first, Sample(problem="the daemon is not running"))
    again = with_sample(down, Sample(replace(STATUS, pid=2)))
    assert again.note == "the daemon was started again"
    assert handle_key(again, "j")[0].note == ""


def test_q_ends() -> None:
    assert handle_key(view(), "q")[0].is_end
