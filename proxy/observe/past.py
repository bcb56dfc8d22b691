"""Figures of requests in flight and of past ones; the interface of the supervisor's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from proxy.errors import BadRequest

# In place of a client: loading, warming up and filling slots with prompts; next turns computed
# ahead; prompts computed for slot files; checks, calibration and all else between requests.
InternalWork = Literal["(warming)", "(ahead)", "(files)", "(checks)"]

LIMIT_MAX: Final = 10_000

# The figures of one request by name; each value can be JSON.
StoredRequest = Mapping[str, object]


# `reading`: the body is arriving; `paused`: it gave up its slot and waits for another; `stalled`:
# the client does not read; `ending`: the engine has not yet confirmed an idle slot.
Phase = Literal["reading", "queued", "loading", "prefill", "decode", "paused", "stalled", "ending"]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The current figures of a request in flight."""

    id: str
    client: str
    path: str
    model: str | None
    instance: str | None
    slot: int | None  # The engine's `id_slot`; None if the engine chose, or before it has one.
    priority: str
    phase: Phase  # Its phase; for several slots, that of the furthest.
    position: int | None  # Position in the queue, from 1; None if it is not queued.
    age_s: float
    # Prompt tokens, estimated until the engine reports them; None before it has a slot.
    prompt_tokens: int | None
    prompt_tokens_done: int  # Prompt tokens computed or found in the cache (`cached_tokens`).
    cached_tokens: int
    decoded_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """Filters for past requests, latest first; None matches any."""

    limit: int = 20
    request_id: str | None = None  # Chosen by clients, so several requests may have the same id.
    model: str | None = None
    client: str | None = None
    is_failed: bool = False  # Whether to return only requests that ended in an error or a cancel.
    since: float | None = None  # Earliest end, as Unix time.


@dataclass(frozen=True, slots=True)
class RatesQuery:
    """Asks for the rates of equal intervals that end at `until`, in Unix time."""

    until: float
    interval_s: float
    count: int
    client: str | None = None  # None for all clients


class RequestHistory(Protocol):
    async def requests(self, query: HistoryQuery, /) -> Sequence[StoredRequest]:
        """Return the matching requests, latest first.

        Raises:
            StorageFailed: The history cannot be read.
            Unavailable: The history is off.
        """

    async def rates(self, query: RatesQuery, /) -> Mapping[str, Sequence[float | None]]:
        """Return the figures of each interval, by name (see `dashboard.state`), oldest first.

        `queued` is the mean number of queued requests, and a request counts in the interval in
        which it ended. Raises StorageFailed.
        """

    async def cache_rates(
        self, query: RatesQuery, /
    ) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Return for each model the prompt tokens of each interval, oldest first.

        `slot`, `host_cache`, `disk` and `node`: found there, `node` being another machine;
        `computed`; and `saved_s`, the computing time that caches saved. Raises StorageFailed.
        """


@dataclass(frozen=True, slots=True)
class ForgottenConversation:
    """Counts of a conversation's deleted caches; `in_use`: a request in flight belongs to it."""

    files: int
    slots: int
    in_use: bool


class Conversations(Protocol):
    async def forget_of(self, request: StoredRequest, /) -> ForgottenConversation | None:
        """Forget the conversation of a past request; None if it is unknown."""


_LIMIT: Final = 20
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


def past_query(query: Mapping[str, str], own_client: str | None) -> HistoryQuery:
    """Parse `limit`, `model`, `client`, `failed` and `since` (Unix time); raise BadRequest.

    `own_client` is the only client whose requests may be shown; None for all clients.
    """
    failed = query.get("failed", "false").lower()
    if failed not in _TRUTHS:
        raise BadRequest("failed must be true or false")
    return HistoryQuery(
        limit=_limit(query.get("limit")),
        model=query.get("model"),
        client=own_client if own_client is not None else query.get("client"),
        is_failed=_TRUTHS[failed],
        since=_since(query.get("since")),
    )


def _limit(given: str | None) -> int:
    if given is None:
        return _LIMIT
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= LIMIT_MAX):
        raise BadRequest(f"limit must be 1 to {LIMIT_MAX}")
    return int(given)


def _since(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        return float(given)
    except ValueError as error:
        raise BadRequest("since must be Unix time in seconds") from error
