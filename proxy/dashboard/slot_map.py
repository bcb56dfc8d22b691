"""The slots of an instance, each with what it does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.router.lease import LeaseStats, by_slot


def slots_of(leases: Sequence[LeaseStats], count: int, started_at_s: float) -> dict[str, Any]:
    """The slots by number. A lease whose slot is not known is shown in the first free one.

    Args:
        leases: Slots in use.
        count: Of all slots.
        started_at_s: What times are counted from.
    """
    placed = by_slot(leases, count)
    return {str(number): _slot(lease, started_at_s) for number, lease in placed.items()}


def _slot(lease: LeaseStats | None, started_at_s: float) -> dict[str, Any]:
    if lease is None:
        return {"phase": "idle"}
    return {
        "phase": lease.phase,
        "request": lease.request_id,
        "client": lease.client,
        "prompt_done": lease.prompt_done,
        "prompt_total": lease.prompt_total,
        "cached": lease.cached,
        "decoded": lease.decoded,
        "began_at_s": round(lease.began_at_s - started_at_s, 1),
    }
