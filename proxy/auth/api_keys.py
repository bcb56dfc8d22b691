"""Finds the API key of a request, and limits the requests and tokens of each key.

The keys file is reloaded when it changes. A key that is removed from the file is rejected from the
next check on. If the file becomes unreadable, the keys stay as they were and one event reports it.

A request over HTTP counts against `requests_per_minute` and `max_in_flight` when it arrives. Each
line of a batch and each prompt of `/v1/batch/completions` counts as a request too. A token bucket
lets `requests_per_minute` pass at once, then one more every 60 s / requests_per_minute. State is
kept for each key that was ever used; keys come from a file, so they are few. An address may send
ten wrong tokens or keys at once, then one every six seconds.

Tokens are the `total_tokens` in the `usage` of a response: the prompt, including cached tokens, and
the answer. The estimated tokens of a prompt are reserved before it is computed; when its slots are
free again, the reservation ends and the actual tokens are charged. Answers are not reserved: most
are far shorter than their limit. So requests that run at the same time can exceed a limit by their
answers, and later requests wait until the bucket has recovered. The limit of a minute is a bucket
of as many tokens, which fills steadily; a request larger than the bucket passes when it is full. A
day ends at midnight of this machine's time zone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from proxy.auth.auth_proxy import USER, AuthProxy
from proxy.auth.keys_file import FileVersion, Key, file_version, read_keys
from proxy.errors import ConfigError, ContextTooLong, KeyLimited, TooManyRequests, Unauthorized
from proxy.observe.record import Emit
from proxy.settings import AuthProxySettings

# The key of a request; None if it needs no key.
KEY: Final[web.RequestKey[Key | None]] = web.RequestKey("key", Key)

LIVE: Final = "/health/live"
# These paths need no key.
OPEN_PATHS: Final = frozenset({"/health", "/v1/health", LIVE})
_BEARER: Final = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_RECHECK_S: Final = 1.0
# Each key in few ways of writing its header.
_KNOWN_MAX: Final = 1024


class ApiKeys:
    """The keys of the file, and `own_key`, which is in no file. Raises ConfigError.

    If there are neither, no request needs a key.
    """

    def __init__(
        self,
        path: Path | None,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        *,
        own_key: Key | None = None,
        auth_proxy: AuthProxySettings | None = None,
    ) -> None:
        # The keys of the file that have token limits, by name.
        self.limited: Mapping[str, Key] = {}
        self._path = path
        self._own_keys = (own_key,) if own_key else ()
        self._auth_proxy = AuthProxy(auth_proxy) if auth_proxy else None
        self._emit = emit
        self._clock = clock
        self.are_needed = bool(own_key or path)
        self._keys: tuple[Key, ...] = ()
        self._version: FileVersion | None = None
        # Keys of the file or our own by the headers that clients send with them.
        self._known: dict[tuple[tuple[str, ...], ...], Key] = {}
        if path is not None:
            self._read(path)
        self._checked_at_s = clock()

    def find_key(self, name: str) -> Key | None:
        """Return the key of this name; None if it does not exist or was removed."""
        current = self._current()
        if self._auth_proxy and name.startswith(USER):
            return self._auth_proxy.find_key(name, current)
        return next((key for key in current if key.name == name), None)

    def with_text(self, text: str) -> Key | None:
        return find(text, self._current())

    def key_of(self, request: web.BaseRequest) -> Key | None:
        """Return the key of a request; None if no keys are configured.

        Raises Unauthorized; Forbidden: no group of a signed-in user may use this server.
        """
        if not self.are_needed:
            return None
        headers, now_s = request.headers, self._clock()
        if now_s - self._checked_at_s >= _RECHECK_S:
            self._check(now_s)
        if self._auth_proxy and (user := self._auth_proxy.key_of(request, self._keys)):
            if user.limits_tokens and self.limited.get(user.name) != user:
                knows = self._auth_proxy.knows
                kept = {
                    name: key
                    for name, key in self.limited.items()
                    if knows(name) or not name.startswith(USER)
                }
                self.limited = {**kept, user.name: user}
            return user
        given = tuple(headers.getall("Authorization", ())), tuple(headers.getall("X-Api-Key", ()))
        if known := self._known.get(given):
            return known
        key = find(_key_of_headers(*given), (*self._own_keys, *self._keys))
        if key is None:
            raise Unauthorized("unknown API key; check it against `corral key list`")
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[given] = key
        return key

    def _current(self) -> tuple[Key, ...]:
        now_s = self._clock()
        if now_s - self._checked_at_s >= _RECHECK_S:
            self._check(now_s)
        return (*self._own_keys, *self._keys)

    def _read(self, path: Path) -> None:
        self._keys, self._version = read_keys(path)
        self._known.clear()
        self.limited = {key.name: key for key in self._keys if key.limits_tokens}

    def _check(self, now_s: float) -> None:
        """Read the file again if it has changed."""
        self._checked_at_s = now_s
        if self._path is None or (version := file_version(self._path)) == self._version:
            return
        self._version = version
        try:
            self._read(self._path)
        except ConfigError as error:
            self._emit("settings.rejected", reason=f"the API keys are unchanged: {error.message}")


def find(given: str, keys: Iterable[Key]) -> Key | None:
    """Return the key with this text. Comparing takes constant time, so timing reveals no key."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def visible_client(request: web.BaseRequest) -> str | None:
    """Return the only client whose requests this one may see; None if it may see all."""
    key = request[KEY]
    return None if key is None or key.admin else key.name


def _key_of_headers(authorizations: Iterable[str], api_keys: Iterable[str]) -> str:
    given = {key.strip() for key in api_keys}
    for field in authorizations:
        bearer = _BEARER.fullmatch(field)
        if bearer is None:
            raise Unauthorized("invalid Authorization header; send Authorization: Bearer KEY")
        given.add(bearer[1])
    given.discard("")
    if len(given) > 1:
        raise Unauthorized("the request has two different API keys; send only one")
    if not given:
        raise Unauthorized("the request has no API key; send Authorization: Bearer KEY")
    return given.pop()


_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class _Usage:
    """The requests of one key."""

    in_flight: int = 0
    full_at_s: float = -math.inf  # When the bucket is full again; it is the bucket's whole state.
    # Set when a request ends; None while nothing waits for that.
    has_ended: asyncio.Event | None = None


class RateLimiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def count(self, key: Key, *, requests: int = 1, in_flight: int = 1) -> Iterator[None]:
        """Count a request towards its minute, and as in flight during the block.

        `requests` and `in_flight` are 0 or 1. Raises KeyLimited.
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
        usage = self._usage.setdefault(key.name, _Usage())
        usage.has_ended = usage.has_ended or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await usage.has_ended.wait()


def next_full_at_s(full_at_s: float, per_minute: int, now_s: float) -> float:
    """Return when the bucket will be full again after one more request.

    The request must wait until that time is at most a minute ahead.
    """
    return max(full_at_s, now_s) + _MINUTE_S / per_minute


def _wait_s(full_at_s: float, now_s: float) -> int:
    """Return for how many whole seconds a request must wait; 0 for a rounding error."""
    wait_s = full_at_s - now_s - _MINUTE_S
    return math.ceil(wait_s) if wait_s > 1e-6 else 0


def _take(usage: _Usage, key: Key, now_s: float, requests: int) -> None:
    if key.max_in_flight is not None and usage.in_flight >= key.max_in_flight:
        raise KeyLimited(
            f"API key {key.name!r} has {usage.in_flight} requests in flight, its limit "
            "(max_in_flight); wait until one ends"
        )
    if key.requests_per_minute is not None and requests:
        full_at_s = next_full_at_s(usage.full_at_s, key.requests_per_minute, now_s)
        if wait_s := _wait_s(full_at_s, now_s):
            raise KeyLimited(
                f"API key {key.name!r} is limited to {key.requests_per_minute} requests a minute "
                f"(requests_per_minute); retry in {wait_s} s",
                wait_s,
            )
        usage.full_at_s = full_at_s


_PER_MINUTE: Final = 10
_ADDRESSES_MAX: Final = 1024


class SignInLimit:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at_s: dict[str, float] = {}  # by address

    def check(self, address: str) -> None:
        """Raises TooManyRequests if the address may not try again now."""
        now_s = self._clock()
        if wait_s := _wait_s(self._next(address, now_s), now_s):
            raise TooManyRequests(f"too many wrong tokens or keys; retry in {wait_s} s", wait_s)

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
    """The tokens of one key."""

    per_minute: int | None = None
    owed: float = 0.0  # Tokens that the bucket of a minute lacked at `at_s`.
    at_s: float = 0.0
    reserved: int = 0  # Estimated prompt tokens of the requests in flight.
    day: str = ""
    of_day: int = 0  # Tokens that were charged on `day`.


class TokenLimits:
    """Reserves and charges the tokens of each key; `now` returns local time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._clock = clock
        self._now = now
        self._spent: dict[str, _Spent] = {}
        self._second, self._day = -1, ""  # of the last look at the calendar, which is slow

    @contextmanager
    def reserve(self, key: Key, prompt_tokens: int, members: Mapping[str, Any]) -> Iterator[None]:
        """Reserve the tokens of a prompt during the block.

        Raises:
            ContextTooLong: The prompt is longer than the key may send.
            KeyLimited: The key has used up its tokens.
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
        """Charge a key the tokens of a request; every name is kept, as a file has few."""
        spent = self._current(name)
        spent.owed += tokens if spent.per_minute else 0
        spent.of_day += tokens

    def restore(self, day: str, tokens: Mapping[str, int]) -> None:
        """Note the tokens that keys used on a day before this process began."""
        for name, count in tokens.items():
            spent = self._spent.setdefault(name, _Spent(at_s=self._clock()))
            spent.day, spent.of_day = day, count

    def headers(self, key: Key) -> dict[str, str]:
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
        """Return a key's tokens, after filling its bucket and beginning a new day if due."""
        now_s = self._clock()
        if int(now_s) != self._second:
            self._second, self._day = int(now_s), self._now().date().isoformat()
        day = self._day
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
    """Admits the requests of keys, over all listening addresses together."""

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = TokenLimits()  # The tokens that keys have used.
        self.keys = keys  # The requests of its `limited` keys must reserve tokens.
        self._clock = clock
        self._rate = RateLimiter(clock)

    def request(self, key: Key, *, has_parts: bool = False) -> AbstractContextManager[None]:
        """Count a request during the block; if it has parts, only they count as in flight.

        Raises KeyLimited.
        """
        return self._rate.count(key, in_flight=0 if has_parts else 1)

    @asynccontextmanager
    async def part(
        self, client: str, *, requests: int = 1, wait_s: float = 0.0
    ) -> AsyncIterator[None]:
        """Count a part of a request, or a line of a batch, during the block.

        Args:
            client: The name of a key; others have no limits.
            requests: Whether the part counts towards its minute, 1 or 0.
            wait_s: How long the part may wait for its key's limits.

        Raises KeyLimited: the key stays at its limits for longer than `wait_s`.
        """
        until_s = self._clock() + wait_s
        with ExitStack() as held:
            if key := self.keys.find_key(client):
                while True:
                    try:
                        held.enter_context(self._rate.count(key, requests=requests))
                        break
                    except KeyLimited as error:
                        pause_s = error.retry_after_s or 1
                        if self._clock() + pause_s > until_s:
                            raise
                    await self._rate.wait(key, pause_s)
            yield
