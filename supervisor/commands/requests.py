"""`corral requests`: the requests in flight, and their end by command."""

from __future__ import annotations

from supervisor.control.client import Client
from supervisor.control.request_status import RequestStatus, phase_text
from supervisor.host.paths import directories
from supervisor.output import CommandResult, duration, table

_HEAD = ("ID", "AGE", "MODEL", "INSTANCE", "SLOT", "CLIENT", "PHASE", "TOKENS", "TOKENS/S")
_NONE = "-"


def list_requests() -> CommandResult:
    """List the requests in flight, oldest first."""
    found = Client(directories().control_socket).requests()
    text = table(_HEAD, list(map(_row, found))) if found else "no request is in flight"
    return CommandResult(found, text)


def cancel(request_id: str) -> CommandResult:
    """End a request with an error, in whatever phase it is."""
    Client(directories().control_socket).cancel_request(request_id)
    return CommandResult({"id": request_id}, f"cancelled {request_id}")


def _row(one: RequestStatus) -> tuple[str, ...]:
    return (
        one["id"],
        duration(one["age_s"]),
        one["model"] or _NONE,
        one["instance"] or _NONE,
        _NONE if one["slot"] is None else str(one["slot"]),
        one["client"] + (" (batch)" if one["priority"] == "batch" else ""),
        phase_text(one),
        str(one["decoded_tokens"] or _NONE),
        f"{one['tokens_per_second']:.1f}" if one["tokens_per_second"] else _NONE,
    )
