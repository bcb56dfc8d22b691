"""How a prompt is divided into chunks beside running streams."""

from __future__ import annotations

import pytest

from proxy.forward.prefill import chunk_tokens, is_worth, next_end, pause_s, rate_tps
from proxy.upstream.upstream import Timings


def chunk(tokens: int, ms: float) -> Timings:
    return Timings(0, tokens, ms, 0, 0)


@pytest.mark.parametrize(
    ("prefill_tps", "expected"), [(20, 32), (700, 105), (800, 120), (100_000, 512)]
)
def test_a_chunk_is_a_pass_of_a_set_time(prefill_tps: float, expected: int) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    assert chunk_tokens(prefill_tps) == expected


@pytest.mark.parametrize(
    ("done", "total", "expected"), [(0, 2000, 120), (1800, 2000, 1920), (1880, 2000, None)]
)
def test_the_request_computes_the_last_chunk_itself(
    done: int, total: int, expected: int | None
) -> None:
    assert next_end(done, total, 800) == expected


def test_a_prompt_of_two_chunks_is_not_divided() -> None:
    assert not is_worth(240, 800)
    assert is_worth(241, 800)


def test_the_streams_have_the_engine_for_a_quarter_as_long_as_the_chunk_had() -> None:
    assert pause_s(chunk(100, 200)) == 0.05
    assert pause_s(chunk(100, 60_000)) == 1.0


def test_the_size_follows_the_rate_of_the_last_chunk() -> None:
    assert rate_tps(chunk(100, 200), before_tps=800) == 500
    assert rate_tps(chunk(0, 0), before_tps=800) == 800
