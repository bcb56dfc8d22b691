"""Shows clients what is stored of their requests (proxy.requests.history.RequestHistory)."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.errors import StorageFailed
from proxy.requests.history import HistoryQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.history.history import History
from supervisor.proxy_adapter.redact import without_directories


class RequestHistoryAdapter:
    def __init__(self, history: History) -> None:
        self._history = history

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """As `RequestHistory.requests`; nothing while it is off."""
        if not self._history.is_on:
            return ()
        try:
            return await self._history.requests(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error
