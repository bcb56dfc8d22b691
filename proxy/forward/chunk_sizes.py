"""How a prompt is divided into chunks beside running streams. Pure."""

from __future__ import annotations

from typing import Final

from proxy.upstream.timings import Timings

# A pass with a chunk takes about so long, which is what a running stream pauses for.
_PASS_S: Final = 0.15
# With 64, which a CPU computes in 0.3 s behind 2 000 tokens, pauses were no half of those without;
# larger ones exceed a micro-batch.
_MIN_TOKENS: Final = 32
_MAX_TOKENS: Final = 512
_WORTH_CHUNKS: Final = 2
_PAUSE_MAX_S: Final = 1.0
# The streams also get a token of each pass with a chunk.
_PAUSE_SHARE: Final = 0.25


def chunk_tokens(prefill_tps: float) -> int:
    """Return the tokens of one chunk at a rate of prefill."""
    return min(_MAX_TOKENS, max(_MIN_TOKENS, round(prefill_tps * _PASS_S)))


def is_worth(new_tokens: int, prefill_tps: float) -> bool:
    """Return whether so many tokens are more than a request computes in short passes anyway."""
    return new_tokens > _WORTH_CHUNKS * chunk_tokens(prefill_tps)


def next_end(done: int, total: int, prefill_tps: float) -> int | None:
    """Return where the next chunk of a prompt ends; None where the rest is one chunk at most."""
    end = done + chunk_tokens(prefill_tps)
    return end if end < total else None


def rate_tps(chunk: Timings, before_tps: float) -> float:
    """Return the rate at which a chunk was computed; that before where it does not say."""
    if not (chunk.prompt_tokens and chunk.prompt_ms):
        return before_tps
    return chunk.prompt_tokens / chunk.prompt_ms * 1000


def pause_s(chunk: Timings) -> float:
    """Return how long the streams then have the engine for themselves: a quarter as long."""
    return min(_PAUSE_MAX_S, _PAUSE_SHARE * chunk.prompt_ms / 1000)
