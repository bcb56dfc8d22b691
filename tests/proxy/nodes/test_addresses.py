"""The addresses of a name after each answer."""

from __future__ import annotations

import pytest

from proxy.nodes.configured import ADDRESSES_MAX, Answer, Known, NodeAddress, after

A, AAAA = "A corral", "AAAA corral"


def machines(*hosts: str, question: str = A) -> tuple[NodeAddress, ...]:
    return tuple(NodeAddress(host, 8080, "corral", (question,)) for host in hosts)


def known(*hosts: str) -> Known:
    return after(Known(), Answer(machines(*hosts), 30))


def hosts(found: Known) -> list[str]:
    return [address.host for address in found.addresses]


def test_addresses_come_and_go_with_the_records() -> None:
    found = known("10.0.0.2", "10.0.0.1")
    assert (hosts(found), found.problem) == (["10.0.0.1", "10.0.0.2"], None)
    found = after(found, Answer(machines("10.0.0.2", "10.0.0.3"), 30))
    assert (hosts(found), found.problem) == (["10.0.0.2", "10.0.0.3"], None)


def test_no_records_count_when_they_are_confirmed() -> None:
    doubted = after(known("10.0.0.1"), Answer())
    assert (hosts(doubted), doubted.pause_s()) == (["10.0.0.1"], 1)
    assert "asked once more" in str(doubted.problem)
    empty = after(doubted, Answer())
    assert (hosts(empty), empty.problem) == ([], "it has no records")
    assert after(doubted, Answer(machines("10.0.0.1"))).problem is None


def test_a_failure_keeps_what_the_question_has_answered() -> None:
    both = (*machines("10.0.0.1"), *machines("fd00::1", question=AAAA))
    before = after(Known(), Answer(both, 30))
    failed = after(before, Answer(machines("10.0.0.2"), 30, {AAAA: "AAAA corral: SERVFAIL"}))
    assert hosts(failed) == ["10.0.0.2", "fd00::1"]
    assert failed.problem == "AAAA corral: SERVFAIL; 2 known addresses are kept"
    doubted = after(known("10.0.0.1"), Answer())
    failed = after(doubted, Answer(failures={A: "silence"}))
    assert hosts(failed) == ["10.0.0.1"]


def test_failures_before_any_answer_are_the_problem() -> None:
    assert after(Known(), Answer(failures={A: "silence"})).problem == "silence"


@pytest.mark.parametrize(("ttl_s", "pause_s"), [(0, 5), (5, 5), (30, 30), (86_400, 60)])
def test_the_ttl_has_bounds(ttl_s: float, pause_s: float) -> None:
    assert after(Known(), Answer(machines("10.0.0.1"), ttl_s)).pause_s() == pause_s


def test_questions_that_fail_are_asked_less_and_less_often() -> None:
    found, pauses = Known(), []
    for _ in range(6):
        found = after(found, Answer(failures={A: "silence"}))
        pauses.append(found.pause_s())
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_addresses_are_bounded_and_known_ones_stay() -> None:
    many = [f"10.1.{at // 256}.{at % 256}" for at in range(ADDRESSES_MAX)]
    found = after(known("10.9.0.1"), Answer(machines(*many, "10.9.0.1"), 30))
    assert len(found.addresses) == ADDRESSES_MAX
    assert "10.9.0.1" in hosts(found)
    together = "all names together may have 1024"
    assert found.problem == f"it has 1025 addresses, of which 1024 are used: {together}"


def test_an_address_is_named_by_its_port_where_the_record_has_it() -> None:
    assert str(NodeAddress("10.0.0.1", 80, "a")) == "10.0.0.1"
    assert str(NodeAddress("10.0.0.1", 80, "a", has_own_port=True)) == "10.0.0.1:80"
    assert str(NodeAddress("fd00::1", 80, "a", has_own_port=True)) == "[fd00::1]:80"
