"""What the proxy needs of the supervisor: requests that have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

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
