"""Slots in use, and the instances that have them."""

from typing import Any

from proxy.router.lease import InstanceStats, LeaseStats
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream

NOW_S = 100.0


def busy_slots(count: int) -> list[SlotState]:
    """Return the list of an engine that uses so many slots."""
    return [SlotState(number, number, 0, is_busy=True) for number in range(count)]


def reading(done: int = 30, **changes: Any) -> LeaseStats:
    """Return a slot in which a prompt of 50 tokens is read, of which 10 were cached."""
    facts = {
        "request_id": "req-secret",
        "client": "somebody",
        "phase": "prefill",
        "prompt_done": done,
        "prompt_total": 50,
        "cached": 10,
        "decoded": 0,
        "began_at_s": NOW_S - 3,
        "first_token_at_s": None,
    }
    return LeaseStats(**{**facts, **changes})


def writing(decoded: int = 21, **changes: Any) -> LeaseStats:
    """Return a slot that has been generating for two seconds."""
    said = {"phase": "decode", "decoded": decoded, "first_token_at_s": NOW_S - 2}
    return reading(50, **{**said, **changes})


def instance(
    *leases: LeaseStats, name: str = "chat.1", slots: int = 3, is_admitted: bool = True
) -> InstanceStats:
    model = name.partition(".")[0]
    upstream = Upstream(name, model, slots, "/run/x.sock", "", 0, api_key="inner-key")
    return InstanceStats(upstream, is_admitted, 4, 500.0, 40.0, leases)
