"""Tokens are reserved when a request arrives, and charged when its slots are free."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from proxy.auth.api_keys import TokenLimits
from proxy.auth.keys_file import Key
from proxy.errors import ContextTooLong, TooManyRequests


class Clock:
    def __init__(self) -> None:
        self.passed_s = 0.0

    def now_s(self) -> float:
        return self.passed_s

    def now(self) -> datetime:
        began = datetime(2026, 11, 22, 23, 0, 0).astimezone()
        return began + timedelta(seconds=self.passed_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> TokenLimits:
    return TokenLimits(clock.now_s, clock.now)


def send(limits: TokenLimits, key: Key, prompt: int, whole: int) -> None:
    with limits.reserve(key, prompt, {}):
        pass
    limits.charge(key.name, whole)


def test_a_minute_fills_up_steadily(limits: TokenLimits, clock: Clock) -> None:
    key = Key("anna", b"", tokens_per_minute=600)
    send(limits, key, 100, 500)
    assert limits.headers(key) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "50s",
    }
    with pytest.raises(TooManyRequests) as refused:
        send(limits, key, 200, 0)
    assert refused.value.headers()["Retry-After"] == "10"
    clock.passed_s = 10
    send(limits, key, 200, 200)


def test_what_runs_is_reserved(limits: TokenLimits) -> None:
    key = Key("anna", b"", tokens_per_minute=600, tokens_per_day=1000)
    with limits.reserve(key, 400, {}), pytest.raises(TooManyRequests):
        send(limits, key, 300, 0)
    send(limits, key, 300, 300)


def test_a_prompt_larger_than_a_minute_passes_where_nothing_is_owed(
    limits: TokenLimits, clock: Clock
) -> None:
    key = Key("anna", b"", tokens_per_minute=600)
    send(limits, key, 1200, 1200)
    with pytest.raises(TooManyRequests) as refused:
        send(limits, key, 600, 0)
    assert refused.value.retry_after_s == 120
    clock.passed_s = 120
    send(limits, key, 600, 600)


def test_a_day_ends_at_midnight_and_survives_a_restart(limits: TokenLimits, clock: Clock) -> None:
    key = Key("anna", b"", tokens_per_day=1000)
    limits.restore("2026-11-22", {"anna": 700, "ben": 5000})
    send(limits, key, 200, 250)
    with pytest.raises(TooManyRequests, match=r"of which it has used 950; retry in 3600 s"):
        send(limits, key, 100, 0)
    clock.passed_s = 3600
    send(limits, key, 100, 100)


def test_a_context_is_a_prompt_and_the_answer_that_it_asks_for(limits: TokenLimits) -> None:
    key = Key("anna", b"", max_context=1000)
    with limits.reserve(key, 800, {"max_tokens": 200}):
        pass
    with (
        pytest.raises(ContextTooLong, match="1001 tokens > 1000 maximum"),
        limits.reserve(key, 801, {"max_tokens": 200}),
    ):
        pass


def test_a_limit_that_is_set_later_begins_with_a_full_minute(
    limits: TokenLimits, clock: Clock
) -> None:
    limits.charge("anna", 10_000)
    clock.passed_s = 1
    send(limits, Key("anna", b"", tokens_per_minute=600), 500, 500)
