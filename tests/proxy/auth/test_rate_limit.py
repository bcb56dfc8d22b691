"""Limits of a key: concurrent requests, and requests per minute."""

from contextlib import ExitStack

import pytest

from proxy.auth.api_keys import RateLimiter, next_full_at_s
from proxy.auth.keys_file import Key
from proxy.errors import TooManyRequests


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key(in_flight: int | None = None, per_minute: int | None = None, name: str = "k") -> Key:
    return Key(name, b"", in_flight, per_minute)


def take(limits: RateLimiter, key: Key) -> None:
    with limits.count(key):
        pass


def test_a_key_without_limits_has_none() -> None:
    limits = RateLimiter(Clock())
    with ExitStack() as held:
        for _ in range(1000):
            held.enter_context(limits.count(key()))


def test_a_request_over_the_limit_is_rejected_until_another_ends() -> None:
    limits = RateLimiter(Clock())
    with limits.count(key(in_flight=2)):
        with (
            limits.count(key(in_flight=2)),
            pytest.raises(TooManyRequests, match="max_in_flight"),
        ):
            take(limits, key(in_flight=2))
        take(limits, key(in_flight=2))


def test_a_failed_request_is_no_longer_in_flight() -> None:
    limits = RateLimiter(Clock())
    with pytest.raises(ZeroDivisionError), limits.count(key(in_flight=1)):
        raise ZeroDivisionError
    take(limits, key(in_flight=1))


def test_keys_do_not_share_their_limits() -> None:
    limits = RateLimiter(Clock())
    with limits.count(key(in_flight=1)):
        take(limits, key(in_flight=1, name="other"))


def test_a_minutes_requests_can_come_at_once_then_one_at_a_time() -> None:
    clock = Clock()
    limits = RateLimiter(clock)
    for _ in range(60):
        take(limits, key(per_minute=60))
    with pytest.raises(TooManyRequests) as refused:
        take(limits, key(per_minute=60))
    assert refused.value.headers() == {"Retry-After": "1"}
    clock.now_s += 1
    take(limits, key(per_minute=60))
    with pytest.raises(TooManyRequests):
        take(limits, key(per_minute=60))


@pytest.mark.parametrize(("per_minute", "wait_s"), [(1, 60), (3, 20), (7, 9), (1000, 1)])
def test_a_retry_after_the_given_time_is_accepted(per_minute: int, wait_s: int) -> None:
    clock = Clock()
    limits = RateLimiter(clock)
    one = key(per_minute=per_minute)
    for _ in range(per_minute):
        take(limits, one)
    with pytest.raises(TooManyRequests) as refused:
        take(limits, one)
    assert refused.value.retry_after_s == wait_s
    clock.now_s += wait_s
    take(limits, one)


def test_a_rejected_request_does_not_count() -> None:
    clock = Clock()
    limits = RateLimiter(clock)
    take(limits, key(per_minute=1))
    for _ in range(100):
        with pytest.raises(TooManyRequests):
            take(limits, key(per_minute=1))
    clock.now_s += 60
    take(limits, key(per_minute=1))


def test_an_idle_key_gets_at_most_a_minutes_requests() -> None:
    clock = Clock()
    limits = RateLimiter(clock)
    take(limits, key(per_minute=2))
    clock.now_s += 86_400
    take(limits, key(per_minute=2))
    take(limits, key(per_minute=2))
    with pytest.raises(TooManyRequests):
        take(limits, key(per_minute=2))


def test_each_request_postpones_when_the_bucket_is_full() -> None:
    assert next_full_at_s(0.0, 60, now_s=100.0) == 101.0
    assert next_full_at_s(130.0, 2, now_s=100.0) == 160.0
