"""What is measured of a model's engines: running averages over finished requests. Pure.

The engine's own time of a prompt includes what it computed of other prompts in the same passes. So
a sample is all that it computed in that time: the others by the share of their time in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from proxy.estimate.answer_lengths import AnswerLengths
from proxy.estimate.costs import EngineCosts, weighted_depth
from proxy.estimate.least_squares import LeastSquares
from proxy.estimate.prompt_tokens import PromptTokens
from proxy.upstream.timings import average

# Shorter answers measure single passes.
_DECODED_MIN: Final = 4
# Of the time of an answer, at least so much is its own.
_OWN_SHARE_MIN: Final = 0.2


class Span(NamedTuple):
    """When one request was computed, in monotonic seconds.

    Attributes:
        depth: Tokens before those of the prompt that were computed.
    """

    prompt_at_s: float
    first_at_s: float
    end_at_s: float
    prompt_tokens: int
    depth: int
    decoded_tokens: int


class Finished(NamedTuple):
    """A complete response.

    Attributes:
        limit: Of the answer, as the client set it; None: it set none.
        overhead_s: From the lease of its slot until the engine began; None where the engine was
            busy.
    """

    span: Span
    limit: int | None
    overhead_s: float | None


class ModelMeasures:
    """Of one model; of instances of unequal speed, as of an average one."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self.tokens = PromptTokens()
        self._prompts = LeastSquares(3, leading=1)
        self._answers = LeastSquares(2, leading=0)
        self._overhead_s: float | None = None

    def note(self, done: Finished, others: Iterable[Span], weight: float) -> None:
        """Learn from a response; `others` are requests of the same instance."""
        span, beside = done.span, list(others)
        self.lengths.note(span.decoded_tokens, done.limit)
        self._note_prompt(span, beside, weight)
        self._note_answer(span, beside, weight)
        if done.overhead_s is not None:
            before = self._overhead_s
            self._overhead_s = (
                done.overhead_s if before is None else average(before, done.overhead_s)
            )

    def costs(self) -> EngineCosts | None:
        """Return None before the first response."""
        if not self._prompts.samples:
            return None
        prompt_s, token_s, depth_s = self._prompts.paced
        pass_s, answer_s = self._answers.paced
        return EngineCosts(prompt_s, token_s, depth_s, pass_s, answer_s, self._overhead_s or 0.0)

    def _note_prompt(self, span: Span, beside: Iterable[Span], weight: float) -> None:
        duration_s = span.first_at_s - span.prompt_at_s
        if duration_s <= 0:
            return
        tokens, depth = 0.0, 0.0
        for one in (span, *beside):
            computed = one.prompt_tokens * _share(one.prompt_at_s, one.first_at_s, span)
            tokens += computed
            depth += weighted_depth(computed, one.depth)
        self._prompts.add((1.0, tokens, depth), duration_s * weight)

    def _note_answer(self, span: Span, beside: Iterable[Span], weight: float) -> None:
        duration_s = span.end_at_s - span.first_at_s
        if span.decoded_tokens < _DECODED_MIN or duration_s <= 0:
            return
        answer = span._replace(prompt_at_s=span.first_at_s, first_at_s=span.end_at_s)
        answers, own_s = 1.0, duration_s * weight
        for one in beside:
            computed = one.prompt_tokens * _share(one.prompt_at_s, one.first_at_s, answer)
            row = (1.0 if computed else 0.0, computed, weighted_depth(computed, one.depth))
            own_s -= self._prompts.value(row)
            answers += _overlap_s(one.first_at_s, one.end_at_s, answer) / duration_s
        own_s = max(own_s, _OWN_SHARE_MIN * duration_s * weight)
        self._answers.add((1.0, answers), own_s / span.decoded_tokens)


def _overlap_s(begin_s: float, end_s: float, span: Span) -> float:
    """Return for how long a time overlaps that of a span's prompt."""
    return max(0.0, min(end_s, span.first_at_s) - max(begin_s, span.prompt_at_s))


def _share(begin_s: float, end_s: float, span: Span) -> float:
    """Return the share of a time within that of a span's prompt."""
    return _overlap_s(begin_s, end_s, span) / (end_s - begin_s) if end_s > begin_s else 0.0
