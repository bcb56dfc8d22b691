"""Limits of a key on requests and tokens, and of an address on wrong keys.

A request over HTTP counts against `requests_per_minute` and `max_in_flight` when it arrives. Each
line of a batch and each prompt of `/v1/batch/completions` counts as a request too. A token bucket
lets `requests_per_minute` pass at once, then one more every 60 s / requests_per_minute. State is
kept for each key that was ever used; keys come from a file, so they are few. An address may send
ten wrong tokens or keys at once, then one every six seconds.

Tokens are those of `total_tokens` in the `usage` of a response: the prompt, also what a cache had
of it, and the answer. The estimated tokens of a prompt are reserved before it is computed; when its
slots are free again, the reservation ends and what it really took is charged. Answers are not
reserved: most are far shorter than they may be. So requests that run at the same time can exceed a
limit by their answers, and later ones wait until that is paid off. A minute is a bucket of as many
tokens, which fills up steadily; a request larger than the bucket passes when it is full. A day ends
at midnight of this machine's time zone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.errors import ContextTooLong, KeyLimited, TooManyRequests

_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class _Usage:
    """Of one key.

    Attributes:
        full_at_s: When the bucket is full again; it is the bucket's whole state.
        has_ended: Set when a request ends; None while nobody waits for that.
    """

    in_flight: int = 0
    full_at_s: float = -math.inf
    has_ended: asyncio.Event | None = None


class RateLimiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def holding(self, key: Key, *, requests: int = 1, in_flight: int = 1) -> Iterator[None]:
        """Count requests of a minute, and those in flight for the length of the block.

        Each is 0 or 1. Raises KeyLimited.
        """
        usage = self._usage.setdefault(key.name, _Usage())
        _take(usage, key, self._clock(), requests)
        usage.in_flight += in_flight
        try:
            yield
        finally:
            usage.in_flight -= in_flight
            if usage.has_ended:
                usage.has_ended.set()
                usage.has_ended = None

    async def wait(self, key: Key, limit_s: float) -> None:
        """Wait until a request of a key ends."""
        usage = self._usage.setdefault(key.name, _Usage())
        usage.has_ended = usage.has_ended or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await usage.has_ended.wait()


def next_full_at_s(full_at_s: float, per_minute: int, now_s: float) -> float:
    """When the bucket will be full again after one more request.

    The request must wait until the returned time is at most a minute ahead.
    """
    return max(full_at_s, now_s) + _MINUTE_S / per_minute


def _take(usage: _Usage, key: Key, now_s: float, requests: int) -> None:
    """Check both limits, and count requests of a minute if neither is exceeded."""
    if key.max_in_flight is not None and usage.in_flight >= key.max_in_flight:
        raise KeyLimited(
            f"API key {key.name!r} has {usage.in_flight} requests in flight, its limit "
            "(max_in_flight); wait until one ends"
        )
    if key.requests_per_minute is not None and requests:
        full_at_s = next_full_at_s(usage.full_at_s, key.requests_per_minute, now_s)
        wait_s = full_at_s - now_s - _MINUTE_S
        if wait_s > 1e-6:  # less is a rounding error
            raise KeyLimited(
                f"API key {key.name!r} is limited to {key.requests_per_minute} requests a minute "
                f"(requests_per_minute); retry in {math.ceil(wait_s)} s",
                math.ceil(wait_s),
            )
        usage.full_at_s = full_at_s


_PER_MINUTE: Final = 10
_ADDRESSES_MAX: Final = 1024


class SignInLimit:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at_s: dict[str, float] = {}  # by address

    def check(self, address: str) -> None:
        """Raises TooManyRequests where it may not try again now."""
        now_s = self._clock()
        wait_s = self._next(address, now_s) - now_s - _MINUTE_S
        if wait_s > 1e-6:  # less is a rounding error
            retry_after_s = math.ceil(wait_s)
            raise TooManyRequests(
                f"too many wrong tokens or keys; retry in {retry_after_s} s", retry_after_s
            )

    def note_failure(self, address: str) -> None:
        now_s = self._clock()
        full_at_s = self._next(address, now_s)
        if len(self._full_at_s) >= _ADDRESSES_MAX:
            known = self._full_at_s.items()
            self._full_at_s = {address: at_s for address, at_s in known if at_s > now_s}
        if len(self._full_at_s) < _ADDRESSES_MAX or address in self._full_at_s:
            self._full_at_s[address] = full_at_s

    def _next(self, address: str, now_s: float) -> float:
        return next_full_at_s(self._full_at_s.get(address, -math.inf), _PER_MINUTE, now_s)


_ANSWER_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")


@dataclass(slots=True)
class _Spent:
    """Of one key; `owed` is what the bucket of a minute lacks to be full, at `at_s`."""

    per_minute: int | None = None
    owed: float = 0.0
    at_s: float = 0.0
    reserved: int = 0
    day: str = ""
    of_day: int = 0


class TokenLimits:
    """`now` is local time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._clock = clock
        self._now = now
        self._spent: dict[str, _Spent] = {}

    @contextmanager
    def reserve(self, key: Key, prompt_tokens: int, members: Mapping[str, Any]) -> Iterator[None]:
        """Reserve the tokens of a prompt for the length of the block.

        Raises:
            ContextTooLong: It is longer than the key may send.
            KeyLimited: The key has used up what it may.
        """
        check_context(key, prompt_tokens, members)
        spent = self._current(key.name)
        spent.per_minute = key.tokens_per_minute
        self._check_minute(key, spent, prompt_tokens)
        self._check_day(key, spent, prompt_tokens)
        spent.reserved += prompt_tokens
        try:
            yield
        finally:
            spent.reserved -= prompt_tokens

    def charge(self, name: str, tokens: int) -> None:
        """Charge a key what a request took; any name is kept, and those in a file are few."""
        spent = self._current(name)
        spent.owed += tokens if spent.per_minute else 0
        spent.of_day += tokens

    def restore(self, day: str, tokens: Mapping[str, int]) -> None:
        """Note what keys used on a day before this process began."""
        for name, count in tokens.items():
            spent = self._spent.setdefault(name, _Spent(at_s=self._clock()))
            spent.day, spent.of_day = day, count

    def headers(self, key: Key) -> dict[str, str]:
        """Header fields as of OpenAI's API, for a key with a limit of tokens a minute."""
        if (limit := key.tokens_per_minute) is None:
            return {}
        spent = self._current(key.name)
        left = max(0, limit - math.ceil(spent.owed) - spent.reserved)
        reset_s = max(0.0, spent.owed) * _MINUTE_S / limit
        return {
            "x-ratelimit-limit-tokens": str(limit),
            "x-ratelimit-remaining-tokens": str(left),
            "x-ratelimit-reset-tokens": f"{math.ceil(reset_s)}s",
        }

    def _current(self, name: str) -> _Spent:
        """Let the bucket fill up, and begin a new day."""
        now_s, day = self._clock(), f"{self._now():%Y-%m-%d}"
        spent = self._spent.setdefault(name, _Spent(at_s=now_s, day=day))
        filled = (now_s - spent.at_s) * (spent.per_minute or 0) / _MINUTE_S
        spent.owed, spent.at_s = max(0.0, spent.owed - filled), now_s
        if spent.day != day:
            spent.day, spent.of_day = day, 0
        return spent

    def _check_minute(self, key: Key, spent: _Spent, tokens: int) -> None:
        limit = key.tokens_per_minute
        held = spent.owed + spent.reserved
        if limit is None or not held or held + tokens <= limit:
            return
        wait_s = max(1, math.ceil((held + min(tokens, limit) - limit) * _MINUTE_S / limit))
        raise KeyLimited(
            f"API key {key.name!r} is limited to {limit} tokens a minute (tokens_per_minute); "
            f"retry in {wait_s} s",
            wait_s,
        )

    def _check_day(self, key: Key, spent: _Spent, tokens: int) -> None:
        limit = key.tokens_per_day
        if limit is None or spent.of_day + spent.reserved + tokens <= limit:
            return
        now = self._now()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        wait_s = max(1, math.ceil((midnight - now).total_seconds()))
        raise KeyLimited(
            f"API key {key.name!r} is limited to {limit} tokens a day (tokens_per_day), of which "
            f"it has used {spent.of_day}; retry in {wait_s} s",
            wait_s,
        )


def check_context(key: Key, prompt_tokens: int, members: Mapping[str, Any]) -> None:
    """Raise ContextTooLong where the prompt and the requested answer are longer than allowed."""
    if key.max_context is None:
        return
    found = (members.get(name) for name in _ANSWER_LIMITS)
    answer = max((tokens for tokens in found if type(tokens) is int), default=0)
    total = prompt_tokens + max(0, answer)
    if total > key.max_context:
        raise ContextTooLong(
            f"prompt is too long: {total} tokens > {key.max_context} maximum (max_context of API "
            f"key {key.name!r}); about {prompt_tokens} are its own, and {max(0, answer)} those of "
            "the answer that it asks for"
        )


class Admission:
    """Of all addresses together.

    Attributes:
        keys: Whose `limited` are to reserve tokens.
        tokens: What keys have spent of their tokens.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = TokenLimits()
        self.keys = keys
        self._clock = clock
        self._rate = RateLimiter(clock)

    def headers(self, key: Key) -> Mapping[str, str]:
        """Header fields of a response that say what a key has left."""
        return self.tokens.headers(key) if key.name in self.keys.limited else {}

    def request(self, key: Key, *, has_parts: bool = False) -> AbstractContextManager[None]:
        """Count a request for the length of the block.

        One that has parts is in flight by these alone. Raises KeyLimited.
        """
        return self._rate.holding(key, in_flight=0 if has_parts else 1)

    @asynccontextmanager
    async def part(
        self, client: str, *, requests: int = 1, wait_s: float = 0.0
    ) -> AsyncIterator[None]:
        """Count a part of a request, or a line of a batch, for the length of the block.

        Args:
            client: The name of its key; any other has no limits.
            requests: How many it counts as in a minute, 0 or 1.
            wait_s: How long it may wait until its key has less in flight, or a minute is over.

        Raises:
            KeyLimited: The key is at its limits, and that lasts longer.
        """
        until_s = self._clock() + wait_s
        with ExitStack() as held:
            if key := self.keys.find_key(client):
                while True:
                    try:
                        held.enter_context(self._rate.holding(key, requests=requests))
                        break
                    except KeyLimited as error:
                        pause_s = error.retry_after_s or 1
                        if self._clock() + pause_s > until_s:
                            raise
                    await self._rate.wait(key, pause_s)
            yield
