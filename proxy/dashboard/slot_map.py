"""The slots of an instance, each with what it does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.router.lease import LeaseStats


def slots_of(leases: Sequence[LeaseStats], count: int, started_at_s: float) -> dict[str, Any]:
    """The slots by number. A lease whose slot is not known is shown in the first free one.

    Args:
        leases: Slots in use.
        count: Of all slots.
        started_at_s: What times are counted from.
    """
    placed = {one.id_slot: one for one in leases if one.id_slot is not None}
    named = {id(one) for one in placed.values()}
    others = [one for one in leases if id(one) not in named]
    free = (number for number in range(count + len(leases)) if number not in placed)
    placed |= dict(zip(free, others, strict=False))
    numbers = sorted({*range(count), *placed})
    return {str(one): _slot(placed.get(one), started_at_s) for one in numbers}


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
