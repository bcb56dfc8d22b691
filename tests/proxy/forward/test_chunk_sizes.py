"""How a prompt is divided into chunks beside running streams."""

from __future__ import annotations

import pytest

from proxy.forward.prefill import chunk_tokens, is_worth, pause_s
from proxy.upstream.upstream import Timings


def chunk(tokens: int, ms: float) -> Timings:
    return Timings(0, tokens, ms, 0, 0)


@pytest.mark.parametrize(
    ("prefill_tps", "expected"), [(20, 32), (700, 105), (800, 120), (100_000, 512)]
)
def test_a_chunk_is_a_pass_of_a_set_time(prefill_tps: float, expected: int) -> None:
    """seed 001: BatchConfig.prefer_pure_decode."""
    assert chunk_tokens(prefill_tps) == expected


def test_a_prompt_of_two_chunks_is_not_divided() -> None:
    assert not is_worth(240, 800)
    assert is_worth(241, 800)


def test_the_streams_have_the_engine_for_a_quarter_as_long_as_the_chunk_had() -> None:
    assert pause_s(chunk(100, 200)) == 0.05
    assert pause_s(chunk(100, 60_000)) == 1.0
