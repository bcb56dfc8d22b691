"""What a client asks of requests that have ended, read from the query of a url. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from proxy.errors import BadRequest
from proxy.requests.history import LIMIT_MAX, HistoryQuery

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
