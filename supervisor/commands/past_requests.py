"""`corral requests --last|show|forget`: requests that have ended.

A daemon has the database to itself, so it is asked; without one, the file is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from proxy.requests.history import HistoryQuery, StoredRequest
from supervisor.commands.request_text import request_lines, request_rows, running_lines
from supervisor.control.client import Client
from supervisor.errors import (
    HistoryUnavailable,
    NoSuchRequest,
    NotRunning,
    SettingsInvalid,
)
from supervisor.host.paths import directories
from supervisor.output import CommandResult, warn

if TYPE_CHECKING:
    from supervisor.history.database import HistoryDatabase

_LIMIT: Final = 20
_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which of the requests that ended; nothing chosen: those in flight are meant."""

    last: int | None
    model: str | None
    client: str | None
    is_failed: bool
    since: str | None

    @property
    def is_any(self) -> bool:
        return self.is_failed or any(
            one is not None for one in (self.last, self.model, self.client, self.since)
        )


def list_past(chosen: Chosen) -> CommandResult:
    """List requests that have ended, the latest last; works without a daemon."""
    query = HistoryQuery(
        limit=chosen.last or _LIMIT,
        model=chosen.model,
        client=chosen.client,
        is_failed=chosen.is_failed,
        since=None if chosen.since is None else since_of(chosen.since, datetime.now(UTC)),
    )
    found = list(reversed(past(query)))
    return CommandResult(found, request_rows(found) if found else "no such request is stored")


def show(request_id: str) -> CommandResult:
    """Show every figure of a request, in flight or ended, and where its time went."""
    for one in running():
        if one["id"] == request_id:
            return CommandResult({"state": "in_flight", **one}, running_lines(one))
    found = past(HistoryQuery(limit=2, request_id=request_id))
    if not found:
        raise NoSuchRequest(
            f"no request has the id {request_id}", hint="corral requests --last 20 lists some"
        )
    notes = ("further requests have this id; this is the latest",) if len(found) > 1 else ()
    return CommandResult({"state": "finished", **found[0]}, request_lines(found[0]), notes)


def latest_ids() -> list[str]:
    """Return the ids of requests in flight, and of the latest that have ended."""
    return [str(one["id"]) for one in (*running(), *past(HistoryQuery(limit=_LIMIT)))]


def forget(model: str | None, *, everything: bool) -> CommandResult:
    """Delete what is stored of the requests of a model, or of all; works without a daemon."""
    if (model is None) is not everything:
        raise SettingsInvalid("name a model with --model, or give --all")
    try:
        count = Client(directories().control_socket).forget_requests(model)
    except NotRunning:
        count = _read(lambda database: database.forget(model), 0)
    return CommandResult({"count": count}, f"deleted: figures of {count} requests")


def since_of(text: str, now: datetime) -> float:
    """Return the Unix time that `90s`, `1h`, `2d` (ago) or an ISO 8601 date in local time means.

    Raises:
        SettingsInvalid: It is neither.
    """
    if found := _AGE.fullmatch(text):
        return now.timestamp() - float(found[1]) * _SECONDS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise SettingsInvalid(
            f"--since {text!r} is no time", hint="use 90s, 15m, 1h, 2d or 2026-11-22T10:00"
        ) from None


def running() -> Sequence[StoredRequest]:
    """Return the requests in flight; none without a daemon."""
    try:
        return [dict(one) for one in Client(directories().control_socket).requests()]
    except NotRunning:
        return ()


def past(query: HistoryQuery) -> Sequence[StoredRequest]:
    """Return requests that have ended, the latest first; works without a daemon."""
    try:
        return Client(directories().control_socket).past_requests(query)
    except NotRunning:
        from supervisor.history import statements

        return _read(lambda database: database.run(lambda one: statements.select(one, query)), ())


def _read(work: Callable[[HistoryDatabase], Result], nothing: Result) -> Result:
    """Use the file without a daemon; `nothing` where there is none."""
    from supervisor.history.database import HistoryDatabase, HistoryFailedError

    path = directories().history
    if not path.exists():
        return nothing
    database = HistoryDatabase(path)
    try:
        return work(database)
    except HistoryFailedError as error:
        raise HistoryUnavailable(f"the history cannot be read: {error}") from error
    finally:
        database.close()
        if found := database.set_aside:
            warn(f"the history could not be read and begins again: {found.reason} ({found.kept})")
