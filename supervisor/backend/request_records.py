"""Connects the proxy with records: past requests, sums of usage; metrics of RPC workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from proxy.endpoints.usage import UsageQuestion
from proxy.errors import BadRequest, StorageFailed, Unavailable, quote
from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.backend.models import without_directories
from supervisor.errors import HistoryUnavailable
from supervisor.records.usage import By, Query, first_day
from supervisor.records.writer import Records


class RecordsAdapter:
    def __init__(self, records: Records) -> None:
        self._records = records

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Implements `RequestHistory.requests`; empty while the history is off."""
        if not self._records.keeps_history:
            return ()
        try:
            return await self._records.requests(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error

    async def usage(self, question: UsageQuestion, /) -> Sequence[Mapping[str, Any]]:
        query = _query(question)
        try:
            return await self._records.usage(query)
        except HistoryUnavailable as error:
            raise Unavailable(without_directories(error.message)) from error


def _query(question: UsageQuestion) -> Query:
    if question.by not in {None, *get_args(By)}:
        choices = ", ".join(get_args(By))
        raise BadRequest(f"by={quote(question.by or '')} is unknown; expected {choices}")
    today = datetime.now().astimezone().date()
    try:
        since = first_day(question.since, today)
    except ValueError as error:
        raise BadRequest(f"since: {error}; write 2026-11-22, 2026-11 or 7d") from error
    by: Any = question.by
    return Query(by, since, question.key, question.model)
