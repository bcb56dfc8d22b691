"""Measurements of a model's engines: averages and regressions over finished requests. Pure.

The engine's time for a prompt includes other prompts in the same passes. So a sample contains all
work in that time: other requests count by the share of their time that overlaps it.

Only the length of a prompt in bytes is known; tokenizer and template decide its number of tokens.
The tokens to compute are learned separately from the whole: the difference of two large estimates
would be mostly error. `Correction` compares recent estimates with real times, by the number of
other requests: later requests take slots with lower numbers, and programs take processor time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from proxy.common.least_squares import LeastSquares
from proxy.router.forecast import EngineCosts, PromptRow, prompt_row
from proxy.upstream.upstream import BATCH_TOKENS, Timings, average

_SAMPLES_MAX: Final = 64
# The assumed length of an answer before the first one.
_TOKENS: Final = 128.0


class AnswerLengths:
    """The latest answers of a model, each with its limit."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_SAMPLES_MAX)

    def note(self, decoded_tokens: int, limit: int | None) -> None:
        """Add a complete answer; an answer that its limit ended would have been longer."""
        is_cut = limit is not None and decoded_tokens >= limit
        self._lengths.append(math.inf if is_cut else decoded_tokens)

    def expected(self, limit: int | None, decoded_tokens: int = 0) -> float:
        """Return the expected further tokens: the median of answers that got this far."""
        longer = [length for length in self._lengths if length > decoded_tokens]
        # An answer that is longer than all known ones is assumed to get half as long again.
        length = median(longer) if longer else max(_TOKENS, 1.5 * decoded_tokens)
        if length == math.inf and limit is None:
            length = max(_TOKENS, 1.5 * decoded_tokens)
        return max(1.0, min(length, math.inf if limit is None else limit) - decoded_tokens)


_LATEST_MAX: Final = 32
_MIN: Final = 8
_LEVELS: Final = 5
# A correction goes half the way, by the square root of the ratio, within this factor. The costs
# themselves follow a machine that became slower.
_FACTOR_MAX: Final = 1.4


class Correction:
    """The factor by which one model's estimates are corrected."""

    def __init__(self) -> None:
        self._ratios: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_LATEST_MAX)
        )

    def note(self, others: int, estimated_s: float, real_s: float) -> None:
        """Add the real time for an uncorrected estimate beside `others` other requests."""
        if estimated_s > 0:
            self._ratios[_level(others)].append(real_s / estimated_s)

    def factor(self, others: int) -> float:
        ratios = self._ratios.get(_level(others), ())
        if len(ratios) < _MIN:
            return 1.0
        return min(_FACTOR_MAX, max(1 / _FACTOR_MAX, math.sqrt(median(ratios))))


def _level(others: int) -> int:
    """Return the level of 0, 1, 2 to 3, 4 to 7, or more other requests."""
    return min(others.bit_length(), _LEVELS - 1)


# Scales of the regressors: a template counts as much as 32 tokens. Assumed: no template, and as
# many tokens as estimated.
_SCALES: Final = (1 / 32, 1.0)
_ASSUMED: Final = (0.0, 1.0)
_HITS_MAX: Final = 16
_EXPECTED_MIN_TOKENS: Final = 64
_HIT: Final = 0.5
_GROWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class PromptLength:
    """The length of a prompt."""

    tokens: int  # Tokens, estimated from its bytes.
    cached: int = 0  # The part of them expected in a cache.

    @property
    def new(self) -> int:
        return self.tokens - self.cached


class PromptTokens:
    """Predicts the tokens of one model's prompts from their lengths."""

    def __init__(self) -> None:
        self._whole = LeastSquares(_SCALES, _ASSUMED)
        self._new = LeastSquares(_SCALES, _ASSUMED)
        self._hits: deque[bool] = deque(maxlen=_HITS_MAX)

    def note(self, length: PromptLength, timings: Timings) -> None:
        found, computed = timings.cached_tokens, timings.prompt_tokens
        whole = max(1, found + computed)
        self._whole.add((1.0, length.tokens), whole)
        expected = whole * length.cached / length.tokens
        is_hit = True
        if length.cached >= _EXPECTED_MIN_TOKENS:
            is_hit = found >= _HIT * expected
            self._hits.append(is_hit)
        # Content that others put into the cache says nothing about lengths.
        if is_hit and found <= expected + _EXPECTED_MIN_TOKENS + _GROWN * whole:
            self._new.add((1.0, length.new), max(1, computed))

    def whole(self, length: PromptLength) -> int:
        return max(1, round(self._whole.value((1.0, length.tokens))))

    def new(self, length: PromptLength) -> int:
        if self._hits and sum(self._hits) < _HIT * len(self._hits):
            length = PromptLength(length.tokens)
        return max(1, min(self.whole(length), round(self._new.value((1.0, length.new)))))


# Scales of the regressors relative to a prompt token: fixed cost of a prompt 1/8, tokens before
# each token 2 000, tokens before each pass 20. Source: SmolLM2-135M, build 10434, on 2 cores.
_PROMPT_SCALES: Final = (1 / 8, 1.0, 2000.0, 20.0)
# Relative to a pass with answers: four answers, 500 tokens before an answer.
_ANSWER_SCALES: Final = (1.0, 4.0, 500.0)
# Shorter answers measure single passes.
_DECODED_MIN: Final = 4
# The smallest share of a measured time that counts as the request's own.
_OWN_SHARE_MIN: Final = 0.2


class Span(NamedTuple):
    """The times of one request in monotonic seconds, and its tokens."""

    prompt_at_s: float
    first_at_s: float
    end_at_s: float
    prompt_tokens: int
    depth: int  # Cached tokens before the computed tokens of the prompt.
    decoded_tokens: int

    @property
    def whole(self) -> int:
        return self.depth + self.prompt_tokens


# A complete response; the client's token limit for the answer, or None; the time from the lease of
# the slot until the engine began, None if the engine was busy.
Finished = tuple[Span, int | None, float | None]


class ModelMeasures:
    """The measurements of one model, for an instance of average speed."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self.tokens = PromptTokens()
        self.correction = Correction()
        self._prompts = LeastSquares(_PROMPT_SCALES)
        self._answers = LeastSquares(_ANSWER_SCALES)
        self._overhead_s: float | None = None

    def note(
        self,
        done: Finished,
        others: Iterable[Span] = (),
        weight: float = 1.0,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """Learn from a response.

        Args:
            others: Other requests of the same instance.
            weight: The instance's speed as a multiple of an average instance's.
            batch_tokens: The most tokens in one of its passes.
        """
        span, limit, overhead_s = done
        beside = list(others)
        self.lengths.note(span.decoded_tokens, limit)
        self._note_prompt(span, beside, weight, batch_tokens)
        self._note_answer(span, beside, weight, batch_tokens)
        if overhead_s is not None:
            before = self._overhead_s
            self._overhead_s = overhead_s if before is None else average(before, overhead_s)

    def costs(self) -> EngineCosts | None:
        """Return the learned costs; None before the first response."""
        if not self._prompts.samples:
            return None
        prompt, each, depth, passes = self._prompts.paced_coefficients
        base, answers, depths = self._answers.paced_coefficients
        costs = (prompt, each, depth, passes), (base, answers, depths)
        return EngineCosts(*costs, self._overhead_s or 0.0)

    def _note_prompt(
        self, span: Span, beside: Iterable[Span], weight: float, batch_tokens: int
    ) -> None:
        duration_s = (span.first_at_s - span.prompt_at_s) * weight
        if duration_s <= 0:
            return
        rows, answers_s = [prompt_row(span.prompt_tokens, span.depth, batch_tokens)], 0.0
        for other in beside:
            rows.append(_prompt_part(other, span.prompt_at_s, span.first_at_s, batch_tokens))
            tokens = other.decoded_tokens * _share(
                other.first_at_s, other.end_at_s, span.prompt_at_s, span.first_at_s
            )
            answers_s += tokens * self._answers.value((0.0, 1.0, other.whole))
        own_s = max(duration_s - answers_s, _OWN_SHARE_MIN * duration_s)
        self._prompts.add([sum(column) for column in zip(*rows, strict=True)], own_s)

    def _note_answer(
        self, span: Span, beside: Iterable[Span], weight: float, batch_tokens: int
    ) -> None:
        lasts_s = span.end_at_s - span.first_at_s
        if span.decoded_tokens < _DECODED_MIN or lasts_s <= 0:
            return
        answers, depths, prompts_s = 1.0, float(span.whole), 0.0
        for other in beside:
            row = _prompt_part(other, span.first_at_s, span.end_at_s, batch_tokens)
            prompts_s += self._prompts.value(row)
            overlap = _overlap_s(other.first_at_s, other.end_at_s, span.first_at_s, span.end_at_s)
            answers += overlap / lasts_s
            depths += overlap / lasts_s * other.whole
        own_s = max(lasts_s * weight - prompts_s, _OWN_SHARE_MIN * lasts_s * weight)
        self._answers.add((1.0, answers, depths), own_s / span.decoded_tokens)


def _prompt_part(span: Span, begin_s: float, end_s: float, batch_tokens: int) -> PromptRow:
    """Return the row of a prompt's part that was computed within a time."""
    share = _share(span.prompt_at_s, span.first_at_s, begin_s, end_s)
    if not share:
        return 0.0, 0.0, 0.0, 0.0
    whole = prompt_row(span.prompt_tokens, span.depth, batch_tokens)
    prompts, tokens, depths, passes = (share * part for part in whole)
    return prompts, tokens, depths, passes


def _overlap_s(begin_s: float, end_s: float, other_begin_s: float, other_end_s: float) -> float:
    return max(0.0, min(end_s, other_end_s) - max(begin_s, other_begin_s))


def _share(begin_s: float, end_s: float, other_begin_s: float, other_end_s: float) -> float:
    """Return the share of the first time that lies within the second."""
    if end_s <= begin_s:
        return 0.0
    return _overlap_s(begin_s, end_s, other_begin_s, other_end_s) / (end_s - begin_s)
