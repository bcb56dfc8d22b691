"""What an engine is sent: the captured request, greedy, as a stream. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from proxy.endpoints import EndpointKind
from supervisor.replay.capture import CapturedRequest

_SEED: Final = 1
# Of an answer without a limit whose length is not known either.
_TOKENS: Final = 1024
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
# Times as clocks tell them: a request that begins this soon after an end may have begun before it.
_CLOCK_MS: Final = 2.0
_COMPLETIONS: Final = frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION})


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """One request to send.

    Attributes:
        after: The places of the requests that had ended since the one before it was sent; they are
            answered before it is sent.
    """

    captured: CapturedRequest
    after: tuple[int, ...]


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Return whether a request has one possible answer with the same engine."""
    return body.get("temperature") == 0 or body.get("top_k") == 1


def played(requests: Sequence[CapturedRequest]) -> tuple[PlayedRequest, ...]:
    """Return the requests in the order in which they began."""
    ordered = sorted(requests, key=lambda one: one.at_ms)
    ends = deque(sorted(_ends(ordered)))
    return tuple(PlayedRequest(one, tuple(_ended(ends, one.at_ms))) for one in ordered)


def _ends(ordered: Sequence[CapturedRequest]) -> Iterator[tuple[float, int]]:
    """Yield when each request ended that did, and its place."""
    for place, one in enumerate(ordered):
        if one.response is not None:
            yield one.response.end_ms, place


def _ended(ends: deque[tuple[float, int]], at_ms: float) -> Iterator[int]:
    """Take those from the beginning that had ended by a time."""
    while ends and ends[0][0] <= at_ms + _CLOCK_MS:
        yield ends.popleft()[1]


def most_together(requests: Sequence[PlayedRequest]) -> int:
    """Return the most requests that were in flight at once."""
    ended = accumulate(len(one.after) for one in requests)
    return max(at + 1 - count for at, count in enumerate(ended))


def played_body(request: CapturedRequest, model: str, slot: int | None) -> dict[str, Any]:
    body = {
        **request.body,
        "model": model,
        "stream": True,
        "temperature": 0,
        "seed": request.body.get("seed", _SEED),
    }
    if not any(request.body.get(name) for name in _LIMITS):
        body[_limit_name(request.kind)] = _recorded_tokens(request)
    if request.kind in _COMPLETIONS:
        options = request.body.get("stream_options")
        body["stream_options"] = {**(options or {}), "include_usage": True}
    return body if slot is None else {**body, "id_slot": slot}


def _limit_name(kind: EndpointKind) -> str:
    match kind:
        case EndpointKind.RESPONSES:
            return "max_output_tokens"
        case EndpointKind.LLAMA_COMPLETION:
            return "n_predict"
        case _:
            return "max_tokens"


def _recorded_tokens(request: CapturedRequest) -> int:
    timings = request.response.timings if request.response else None
    return timings.decoded_tokens if timings and timings.decoded_tokens else _TOKENS
