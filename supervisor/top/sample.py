"""What the daemon says at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus
from supervisor.control.request_status import RequestStatus
from supervisor.errors import CorralError


@dataclass(frozen=True, slots=True)
class Sample:
    """Status and requests in flight; no status where the daemon gave none, for a `problem`.

    `note`: what became of a cancellation that was asked for.
    """

    status: DaemonStatus | None = None
    requests: Sequence[RequestStatus] = ()
    problem: str = ""
    note: str = ""


def read(client: Client, note: str = "") -> Sample:
    """Ask the daemon, by two requests; raises NotRunning or DaemonBusy."""
    return Sample(client.status(), client.requests(), note=note)


def try_read(client: Client, note: str = "") -> Sample:
    try:
        return read(client, note)
    except CorralError as error:
        return Sample(problem=error.message, note=note)


def cancel(client: Client, request_id: str) -> str:
    """Cancel a request; return a sentence that says what became of it."""
    try:
        client.cancel_request(request_id)
    except CorralError as error:
        return error.message
    return f"cancelled {request_id}"
