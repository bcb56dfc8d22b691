"""The speed and the cache use of one play, or of the capture. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.upstream.timings import Timings
from supervisor.bench.workloads.requests import rate
from supervisor.replay.capture import CapturedRequest
from supervisor.replay.player import Played


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are tokens per second, `first_token_ms` is the median; None where nothing is known.

    `cached_tokens` of `prompt_tokens` were found in the cache.
    """

    answered: int
    failed: int
    prefill_rate: float | None
    decode_rate: float | None
    first_token_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def figures_of(played: Sequence[Played]) -> Figures:
    answered = [one for one in played if one.failure is None]
    return _figures(
        [one.timings for one in answered],
        [one.first_token_ms for one in answered],
        len(played) - len(answered),
    )


def recorded_figures(requests: Iterable[CapturedRequest]) -> Figures:
    """Return those of the capture; its first tokens without the wait for a slot or a load."""
    responses = [one.response for one in requests]
    whole = [one for one in responses if one and one.is_whole]
    first = [
        None if one.first_token_ms is None else max(0.0, one.first_token_ms - one.wait_ms)
        for one in whole
    ]
    return _figures([one.timings for one in whole], first, len(responses) - len(whole))


def _figures(
    timings: Sequence[Timings | None], first_ms: Sequence[float | None], failed: int
) -> Figures:
    known = [one for one in timings if one]
    computed, cached = (sum(found) for found in _sums(known))
    decoded = sum(one.decoded_tokens for one in known)
    first = [one for one in first_ms if one is not None]
    return Figures(
        answered=len(timings),
        failed=failed,
        prefill_rate=rate(computed, sum(one.prompt_ms for one in known)),
        decode_rate=rate(decoded, sum(one.decode_ms for one in known)),
        first_token_ms=statistics.median(first) if first else None,
        prompt_tokens=computed + cached,
        cached_tokens=cached,
        generated_tokens=decoded,
    )


def _sums(known: Sequence[Timings]) -> tuple[list[int], list[int]]:
    return [one.prompt_tokens for one in known], [one.cached_tokens for one in known]


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
