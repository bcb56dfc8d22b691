"""How long the requests of a measurement are: some seconds on any machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.upstream.timings import Timings

_PROMPT_MAX, _PROMPT_S = 500, 5.0
_ANSWER_MIN, _ANSWER_MAX, _ANSWER_S = 16, 96, 0.8
_TOGETHER_MIN, _TOGETHER_MAX, _TOGETHER_S = 8, 40, 0.4
_QUALITY_MIN, _QUALITY_MAX, _QUALITY_S = 8, 40, 0.8
_TOGETHER_PROMPT: Final = 32
_LEAST: Final = 16
# A context that the engine decides is the model's: long enough.
_CTX: Final = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens."""

    prompt: int
    answer: int
    prompt_together: int
    answer_together: int
    quality: int  # generated for each text


def smallest(ctx_slot: int) -> Sizes:
    """A first request, whose speeds decide the sizes of the others."""
    tokens = max(1, min(4 * _LEAST, (ctx_slot or _CTX) // 2 - 1))
    return Sizes(tokens, min(_LEAST, tokens), tokens, tokens, tokens)


def sizes_of(first: Timings, ctx_slot: int) -> Sizes:
    """Sizes for an engine of these speeds; all variants get the same."""
    prefill = 1000 * first.prompt_tokens / max(1.0, first.prompt_ms)
    decode = 1000 * first.decoded_tokens / max(1.0, first.decode_ms)
    room = ctx_slot or _CTX
    answer = min(_within(decode * _ANSWER_S, _ANSWER_MIN, _ANSWER_MAX), max(1, room // 4))
    together = _within(decode * _TOGETHER_S, _TOGETHER_MIN, _TOGETHER_MAX)
    return Sizes(
        prompt=min(_within(prefill * _PROMPT_S, 4 * _LEAST, _PROMPT_MAX), max(1, room // 2)),
        answer=answer,
        prompt_together=min(_TOGETHER_PROMPT, max(1, room // 4)),
        answer_together=min(together, max(1, room // 4)),
        quality=_within(decode * _QUALITY_S, _QUALITY_MIN, _QUALITY_MAX),
    )


def _within(value: float, low: int, high: int) -> int:
    return min(max(round(value), low), high)
