"""Requests that a trial observes."""

from __future__ import annotations

from typing import Any

from supervisor.experiments.verdict import Conversations, FigureName, SideName, TrialFigures

RATE: FigureName = "tokens_per_second"
FIRST: FigureName = "first_token_s"


def request(conversation: int | None = 1, **changes: Any) -> dict[str, Any]:
    """Return the members of `request.finished` for figures: 100 tokens/s after half a second."""
    return {
        "request": "req_1",
        "conversation": conversation,
        "diverted": None,
        "status": 200,
        **dict.fromkeys(("queued_ms", "evict_ms", "load_ms"), 0.0),
        "duration_ms": 900.0,
        "first_token_ms": 500.0,
        "decoded_tokens": 41,
        "engine_decode_ms": 400.0,
        **changes,
    }


def finished(
    *requests: tuple[SideName, dict[str, Any]], others: int = 0, figures: TrialFigures | None = None
) -> TrialFigures:
    figures = figures or TrialFigures()
    for side, fields in requests:
        figures.count_request(side, fields, others)
    return figures


def values(conversations: Conversations) -> list[list[float]]:
    return [[value for value, _ in conversation] for conversation in conversations]
