"""Limits of a key on tokens: a minute, a day, and of one request.

Counted is what `usage` of a response has as `total_tokens`: the prompt, also what a cache had of
it, and the answer. When a request arrives, the estimated tokens of its prompt are reserved; when
its slots are free again, that ends and what it really took is charged. Answers are not
reserved: most are far shorter than they may be. So requests that run at the same time can exceed a
limit by their answers, and later ones wait until that is paid off.

A minute is a bucket of as many tokens, which fills up steadily. A request larger than the bucket
passes where it is full. A day ends at midnight of this machine's time zone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from proxy.auth.keys_file import Key
from proxy.errors import ContextTooLong, KeyLimited

_MINUTE_S: Final = 60.0
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
    def reserved(self, key: Key, prompt_tokens: int, members: Mapping[str, Any]) -> Iterator[None]:
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
        wait_s = _until_midnight_s(self._now())
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
    answer = max((one for one in found if type(one) is int), default=0)
    total = prompt_tokens + max(0, answer)
    if total > key.max_context:
        raise ContextTooLong(
            f"prompt is too long: {total} tokens > {key.max_context} maximum (max_context of API "
            f"key {key.name!r}); about {prompt_tokens} are its own, and {max(0, answer)} those of "
            "the answer that it asks for"
        )


def _until_midnight_s(now: datetime) -> int:
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return max(1, math.ceil((midnight - now).total_seconds()))
