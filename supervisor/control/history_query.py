"""A query for requests that have ended, on the control socket."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from proxy.requests.history import HistoryQuery
from supervisor.errors import SettingsInvalid

_QUERY: TypeAdapter[HistoryQuery] = TypeAdapter(HistoryQuery)


def history_query(body: bytes) -> HistoryQuery:
    """Read a query; raises SettingsInvalid."""
    try:
        return _QUERY.validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid("the body must be a query for requests") from error
