"""When something has been idle for long enough."""

from __future__ import annotations

from supervisor.service.hooks import DAEMON, IdleTimes

LIMITS_S = {False: 10.0, True: 30.0}


def test_each_is_reported_once_until_it_has_a_request() -> None:
    times = IdleTimes(0)
    times.touch("chat", 5)
    assert times.take_due(LIMITS_S, (), 14) == []
    assert times.take_due(LIMITS_S, (), 16) == [("chat", 11)]
    assert times.take_due(LIMITS_S, (), 31) == [(DAEMON, 31)]
    times.touch("chat", 40)
    assert times.take_due(LIMITS_S, (), 50) == [("chat", 10)]


def test_what_has_a_request_in_flight_is_not_idle() -> None:
    times = IdleTimes(0)
    times.touch("chat", 0)
    assert times.take_due(LIMITS_S, {"chat", DAEMON}, 100) == []
    assert times.take_due(LIMITS_S, (), 109) == []


def test_a_model_that_is_not_loaded_is_not_idle() -> None:
    times = IdleTimes(0)
    times.touch("chat", 0)
    times.forget("chat")
    assert times.take_due(LIMITS_S, {"other"}, 20) == []
