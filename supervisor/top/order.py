"""In which order requests are listed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from supervisor.control.request_status import RequestStatus

Order = Literal["age", "model", "tokens/s", "tokens", "client", "phase"]

_PHASES: Final = ("reading", "queued", "loading", "prefill", "decode", "stalled", "ending")
# Names ascend; figures descend, the largest on top.
_BY: Final[Mapping[Order, Callable[[RequestStatus], Any]]] = {
    "age": lambda one: -one["age_s"],
    "model": lambda one: one["model"] or "",
    "tokens/s": lambda one: -one["tokens_per_second"],
    "tokens": lambda one: -one["decoded_tokens"],
    "client": lambda one: one["client"],
    "phase": lambda one: _PHASES.index(one["phase"]) if one["phase"] in _PHASES else -1,
}


def ordered(
    requests: Iterable[RequestStatus], order: Order, *, is_reversed: bool = False
) -> list[RequestStatus]:
    """Sort requests; equal ones by age, the oldest first."""
    by_age = sorted(requests, key=_BY["age"])
    return sorted(by_age, key=_BY[order], reverse=is_reversed)
