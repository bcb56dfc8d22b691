"""Requests that have ended: what the supervisor's history offers, and a client's query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from proxy.errors import BadRequest

LIMIT_MAX: Final = 10_000

# The figures of one request by name; every value can be written as JSON.
StoredRequest = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """Which requests, the latest of them; None: any.

    Attributes:
        request_id: Ids are the clients', so several requests may have one.
        client: The name of an API key, or an address.
        is_failed: Whether only those that ended in an error, or by a cancel.
        since: Unix time, of their end.
    """

    limit: int = 20
    request_id: str | None = None
    model: str | None = None
    client: str | None = None
    is_failed: bool = False
    since: float | None = None


class RequestHistory(Protocol):
    async def requests(self, query: HistoryQuery, /) -> Sequence[StoredRequest]:
        """Return what is asked for, the latest first.

        Raises:
            StorageFailed: It cannot be read.
            Unavailable: It is off.
        """


@dataclass(frozen=True, slots=True)
class ForgottenConversation:
    """What was deleted of a conversation.

    Attributes:
        files: On disk.
        slots: That engines emptied.
        in_use: Whether a request in flight is still of it.
    """

    files: int
    slots: int
    in_use: bool


class Conversations(Protocol):
    async def forget_of(self, request: StoredRequest, /) -> ForgottenConversation | None:
        """Forget the conversation of a request that has ended; None where it is not known."""


_LIMIT: Final = 20
_TRUTHS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


def past_query(query: Mapping[str, str], own_client: str | None) -> HistoryQuery:
    """Read `limit`, `model`, `client`, `failed` and `since` (Unix time).

    Args:
        query: Of the url.
        own_client: Whose requests alone may be shown; None: everybody's.

    Raises:
        BadRequest: One of them has no such value.
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
