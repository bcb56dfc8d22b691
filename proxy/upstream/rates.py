"""An instance's speed: running averages over its responses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.upstream.decode_latency import UNMEASURED, DecodeLatency, Measurement
from proxy.upstream.timings import Timings, average

# Shorter responses measure the time of one batch, not the rate.
_PREFILL_MIN_TOKENS: Final = 16
_DECODE_MIN_TOKENS: Final = 4
# Before the first response: rather slow, so that no request leaves a cache because of a guess.
_PREFILL_TPS: Final = 100.0
_DECODE_TPS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Running averages of one instance, in tokens per second; guesses before the first response.

    Attributes:
        decode_tps: For one request.
        answers: Number of responses in the averages.
        acceptance: Share of drafted tokens that were accepted, 0 to 1.
        latency: Of decoding, by the number of sequences.
    """

    prefill_tps: float = _PREFILL_TPS
    decode_tps: float = _DECODE_TPS
    answers: int = 0
    acceptance: float | None = None
    latency: DecodeLatency = UNMEASURED

    def after(self, timings: Timings, sequences: int = 1, at_s: float = 0.0) -> Rates:
        """The averages after one more response, at a monotonic time, beside other sequences."""
        prefill_tps, decode_tps, latency = self.prefill_tps, self.decode_tps, self.latency
        if timings.prompt_tokens >= _PREFILL_MIN_TOKENS and timings.prompt_ms > 0:
            prefill_tps = self._mix(prefill_tps, timings.prompt_tokens / timings.prompt_ms * 1000)
        if timings.decoded_tokens >= _DECODE_MIN_TOKENS and timings.decode_ms > 0:
            decode_tps = self._mix(decode_tps, timings.decoded_tokens / timings.decode_ms * 1000)
            ms_per_token = timings.decode_ms / timings.decoded_tokens
            newest = Measurement(ms_per_token, timings.decoded_tokens, at_s)
            latency = latency.after(newest, sequences)
        return Rates(prefill_tps, decode_tps, self.answers + 1, self._accepted(timings), latency)

    def _accepted(self, timings: Timings) -> float | None:
        if not timings.drafted_tokens:
            return self.acceptance
        now = timings.accepted_tokens / timings.drafted_tokens
        return now if self.acceptance is None else average(self.acceptance, now)

    def _mix(self, before: float, now: float) -> float:
        return now if not self.answers else average(before, now)
