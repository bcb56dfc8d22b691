"""A request in flight, on the control socket."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:  # commands that only read it start without the proxy's code
    from proxy.requests.snapshot import RequestStats


class RequestStatus(TypedDict):
    """As `RequestStats`."""

    id: str
    client: str
    path: str
    model: str | None
    instance: str | None
    slot: int | None
    priority: str
    phase: str
    position: int | None
    age_s: float
    prompt_tokens: int | None
    prompt_tokens_done: int
    cached_tokens: int
    decoded_tokens: int
    tokens_per_second: float


def request_status(stats: RequestStats) -> RequestStatus:
    return cast("RequestStatus", asdict(stats))


def phase_text(one: RequestStatus) -> str:
    if one["phase"] == "queued":
        return f"queued, place {one['position']}"
    if one["phase"] == "prefill" and one["prompt_tokens"]:
        return f"prefill {one['prompt_tokens_done']} of {one['prompt_tokens']}"
    return one["phase"]
