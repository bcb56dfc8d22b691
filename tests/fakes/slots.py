"""Slots in use, and the instances that have them."""

from typing import Any

from proxy.engine.upstream import Upstream
from proxy.line.lease import LeaseFacts
from proxy.line.seats import SeatFacts

NOW_S = 100.0


def reading(done: int = 30, **changes: Any) -> LeaseFacts:
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
    return LeaseFacts(**{**facts, **changes})


def writing(decoded: int = 21, **changes: Any) -> LeaseFacts:
    """Return a slot that has been generating for two seconds."""
    said = {"phase": "decode", "decoded": decoded, "first_token_at_s": NOW_S - 2}
    return reading(50, **{**said, **changes})


def seat(
    *leases: LeaseFacts, name: str = "chat.1", slots: int = 3, is_admitted: bool = True
) -> SeatFacts:
    model = name.partition(".")[0]
    upstream = Upstream(name, model, slots, "/run/x.sock", "", 0, api_key="inner-key")
    return SeatFacts(upstream, is_admitted, 4, 500.0, 40.0, leases)
