"""What is measured of a model's engines: running averages over finished requests. Pure.

The engine's own time of a prompt includes what it computed of other prompts in the same passes. So
a sample is all that it computed in that time: the others by the share of their time in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from proxy.estimate.answer_lengths import AnswerLengths
from proxy.estimate.correction import Correction
from proxy.estimate.costs import EngineCosts, PromptRow, prompt_row
from proxy.estimate.least_squares import LeastSquares
from proxy.estimate.prompt_tokens import PromptTokens
from proxy.upstream.timings import average
from proxy.upstream.upstream import BATCH_TOKENS

# As much as a token of a prompt is worth about an eighth of what a prompt takes besides, 2 000
# tokens before a token, 20 before a pass. Source: SmolLM2-135M, build 10434, on 2 cores.
_PROMPT_SCALES: Final = (1 / 8, 1.0, 2000.0, 20.0)
# And as much as a pass for answers: four answers, 500 tokens before an answer.
_ANSWER_SCALES: Final = (1.0, 4.0, 500.0)
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

    @property
    def whole(self) -> int:
        """Tokens of the whole prompt."""
        return self.depth + self.prompt_tokens


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
            done: The response.
            others: Requests of the same instance.
            weight: Its speed as a multiple of an average instance's.
            batch_tokens: The most tokens in one of its passes.
        """
        span, beside = done.span, list(others)
        self.lengths.note(span.decoded_tokens, done.limit)
        self._note_prompt(span, beside, weight, batch_tokens)
        self._note_answer(span, beside, weight, batch_tokens)
        if done.overhead_s is not None:
            before = self._overhead_s
            self._overhead_s = (
                done.overhead_s if before is None else average(before, done.overhead_s)
            )

    def costs(self) -> EngineCosts | None:
        """Return None before the first response."""
        if not self._prompts.samples:
            return None
        prompt, each, depth, passes = self._prompts.paced
        base, answers, depths = self._answers.paced
        costs = (prompt, each, depth, passes), (base, answers, depths)
        return EngineCosts(*costs, self._overhead_s or 0.0)

    def _note_prompt(
        self, span: Span, beside: Iterable[Span], weight: float, batch_tokens: int
    ) -> None:
        duration_s = (span.first_at_s - span.prompt_at_s) * weight
        if duration_s <= 0:
            return
        rows, answers_s = [prompt_row(span.prompt_tokens, span.depth, batch_tokens)], 0.0
        for one in beside:
            rows.append(_prompt_part(one, span.prompt_at_s, span.first_at_s, batch_tokens))
            tokens = one.decoded_tokens * _share(
                one.first_at_s, one.end_at_s, span.prompt_at_s, span.first_at_s
            )
            answers_s += tokens * self._answers.value((0.0, 1.0, one.whole))
        own_s = max(duration_s - answers_s, _OWN_SHARE_MIN * duration_s)
        self._prompts.add([sum(column) for column in zip(*rows, strict=True)], own_s)

    def _note_answer(
        self, span: Span, beside: Iterable[Span], weight: float, batch_tokens: int
    ) -> None:
        lasts_s = span.end_at_s - span.first_at_s
        if span.decoded_tokens < _DECODED_MIN or lasts_s <= 0:
            return
        answers, depths, prompts_s = 1.0, float(span.whole), 0.0
        for one in beside:
            row = _prompt_part(one, span.first_at_s, span.end_at_s, batch_tokens)
            prompts_s += self._prompts.value(row)
            overlap = _overlap_s(one.first_at_s, one.end_at_s, span.first_at_s, span.end_at_s)
            answers += overlap / lasts_s
            depths += overlap / lasts_s * one.whole
        own_s = max(lasts_s * weight - prompts_s, _OWN_SHARE_MIN * lasts_s * weight)
        self._answers.add((1.0, answers, depths), own_s / span.decoded_tokens)


def _prompt_part(one: Span, begin_s: float, end_s: float, batch_tokens: int) -> PromptRow:
    """Return what was computed of a prompt within a time."""
    share = _share(one.prompt_at_s, one.first_at_s, begin_s, end_s)
    if not share:
        return 0.0, 0.0, 0.0, 0.0
    whole = prompt_row(one.prompt_tokens, one.depth, batch_tokens)
    prompts, tokens, depths, passes = (share * part for part in whole)
    return prompts, tokens, depths, passes


def _overlap_s(begin_s: float, end_s: float, other_begin_s: float, other_end_s: float) -> float:
    return max(0.0, min(end_s, other_end_s) - max(begin_s, other_begin_s))


def _share(begin_s: float, end_s: float, other_begin_s: float, other_end_s: float) -> float:
    """Return the share of a time that lies within another."""
    if end_s <= begin_s:
        return 0.0
    return _overlap_s(begin_s, end_s, other_begin_s, other_end_s) / (end_s - begin_s)
