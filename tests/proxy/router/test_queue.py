"""Which request is served next."""

from __future__ import annotations

import gc
import weakref
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from support.requests import ask

from proxy.request.request import Priority
from proxy.router.queue import QueuedRequest, RequestQueue
from proxy.settings import ProxySettings


class Name(str):
    """Its weak references show whether the queue still refers to it."""

    __slots__ = ("__weakref__",)


def place(
    client: str = "a", priority: Priority = "interactive", at_s: float = 0.0
) -> QueuedRequest:
    request = ask("hello", client=client, priority=priority, queue_timeout_s=10.0)
    return QueuedRequest(request, at_s)


def line_of(*places: QueuedRequest) -> RequestQueue:
    line = RequestQueue("chat", ProxySettings())
    for place in places:
        line.join(place)
    return line


def serve(line: RequestQueue, now_s: float = 0.0) -> QueuedRequest:
    first = next(line.order(now_s))
    line.take(first)
    return first


def test_a_client_with_many_requests_takes_turns_with_a_client_with_few() -> None:
    line = line_of(place("many"), place("many"), place("many"), place("few"), place("few"))
    served = [serve(line).request.client for _ in range(5)]
    assert served == ["many", "few", "many", "few", "many"]


def test_a_newcomer_is_not_put_behind_all_that_others_sent_before() -> None:
    line = line_of(*(place("many") for _ in range(10)))
    for _ in range(3):
        serve(line)
    line.join(place("new"))
    assert "new" in {serve(line).request.client for _ in range(2)}


def test_ever_new_clients_do_not_put_off_who_waits_already() -> None:
    line = line_of(place("old"), place("old"))
    for number in range(5):
        line.join(place(f"new {number}"))
        serve(line)
    assert "old" not in {entry.request.client for entry in line.order(0.0)}


def test_a_batch_waits_for_the_interactive_but_for_one_turn_in_nine() -> None:
    line = line_of(place("batch", "batch"), *(place(f"{number}") for number in range(12)))
    served = [serve(line).request.priority for _ in range(13)]
    assert served.index("batch") == 8
    assert served.count("batch") == 1


def test_a_batch_that_waited_half_its_patience_goes_every_other_turn() -> None:
    batch = [place("batch", "batch") for _ in range(3)]
    line = line_of(*batch, *(place(f"{number}") for number in range(4)))
    order = [entry.request.priority[0] for entry in line.order(5.0)]
    assert "".join(order) == "ibibibi"


def test_who_leaves_is_as_if_it_had_never_come() -> None:
    first, second, third = place("a"), place("a"), place("a")
    line = line_of(first, second)
    line.leave(second)
    line.leave(second)
    line.join(third)
    assert third.tag == second.tag
    assert [*line.order(0.0)] == [first, third]


def test_who_is_put_back_is_where_it_was() -> None:
    first, second = place("a"), place("b")
    line = line_of(first, second)
    line.take(first)
    line.join(first)
    assert [*line.order(0.0)] == [first, second]
    assert (line.position(first, 0.0), line.position(second, 0.0)) == (1, 2)
    assert line.position(place(), 0.0) == 0


def test_a_line_knows_its_length_and_its_oldest_wait() -> None:
    line = line_of(place(at_s=2.0), place(priority="batch", at_s=1.0))
    assert line.count == 2
    assert (line.waiting("interactive"), line.waiting("batch")) == (1, 1)
    assert line.stats(4.0, 0.0).oldest_wait_s == 3.0
    assert line_of().stats(4.0, 0.0).oldest_wait_s == 0.0


def test_clients_that_came_once_are_not_remembered_for_ever() -> None:
    line = line_of()
    names = weakref.WeakSet[Name]()
    for number in range(2000):
        line.join(place(Name(number)))
        names.add(cast("Name", serve(line).request.client))
    gc.collect()
    assert len(names) < 300


clients = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30)


@given(clients, st.data())
def test_a_clients_order_is_kept_within_a_lane(
    who: list[tuple[str, bool]], data: st.DataObject
) -> None:
    line = line_of()
    joined: dict[QueuedRequest, int] = {}
    served: dict[tuple[str, Priority], list[int]] = {}
    for number, (client, is_batch) in enumerate(who):
        one = place(client, "batch" if is_batch else "interactive")
        joined[one] = number
        line.join(one)
        if data.draw(st.booleans()):
            done = serve(line, float(number))
            served.setdefault((done.request.client, done.request.priority), []).append(joined[done])
    while line.count:
        done = serve(line, 99.0)
        served.setdefault((done.request.client, done.request.priority), []).append(joined[done])
    assert all(numbers == sorted(numbers) for numbers in served.values())
    assert sum(len(numbers) for numbers in served.values()) == len(who)
