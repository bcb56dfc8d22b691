"""How large the requests of a bench are, from what the engine can do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A workload is to take some seconds on any machine: long enough to be exact, short enough to be
# repeated. Both ends keep figures of different machines comparable.
_ANSWER_S, _ANSWER_MIN, _ANSWER_MAX = 0.3, 8, 96
_GENERATION_S, _GENERATION_MIN, _GENERATION_MAX = 2.0, 24, 512
_SYSTEM_S, _SYSTEM_MIN, _SYSTEM_MAX = 0.5, 32, 1024
_LONG_S, _LONG_MIN, _LONG_MAX = 2.0, 128, 16384
_EMBEDDED_MAX: Final = 128
# Left in a context for the words that a chat template adds, and for the error of word counts.
_MARGIN: Final = 0.75
_QUESTION_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """What a variant can do, from a first short request.

    Attributes:
        prefill_rate: Tokens per second; 0 if it generates no text.
        decode_rate: Tokens per second of one stream; 0 if it generates no text.
        ctx_slot: Tokens of context of one slot.
        slots: Sequences decoded at once.
        tokens_per_word: Of the generated texts.
    """

    prefill_rate: float
    decode_rate: float
    ctx_slot: int
    slots: int
    tokens_per_word: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of requests, in tokens unless named otherwise."""

    system: int  # the system prompt that conversations share
    question: int  # what a client adds in each turn
    answer: int  # what is generated in each turn
    turns: int  # of one conversation
    long_prompt: int
    generation: int  # one long answer
    batch_prompts: int  # prompts of one array
    embedded: int  # one text to embed
    slots: int  # clients at once that the variants are measured with
    context: int  # that one request may take, in each variant
    tokens_per_word: float

    def words(self, tokens: int) -> int:
        """The number of words that make about this many tokens."""
        return max(1, round(tokens / self.tokens_per_word))


def choose_sizes(variants: list[Measured]) -> Sizes:
    """Choose sizes that fit into the smallest context and suit the fastest variant."""
    ctx = int(_MARGIN * min(one.ctx_slot for one in variants))
    slots = max(one.slots for one in variants)
    shared_ctx = ctx // slots  # slots of one unified cache share the context
    prefill = max(one.prefill_rate for one in variants)
    decode = max(one.decode_rate for one in variants)
    answer = _within(decode * _ANSWER_S, _ANSWER_MIN, min(_ANSWER_MAX, ctx // 16))
    question = min(_QUESTION_TOKENS, max(4, ctx // 32))
    system = _within(prefill * _SYSTEM_S, _SYSTEM_MIN, min(_SYSTEM_MAX, shared_ctx // 2, ctx // 3))
    return Sizes(
        system=system,
        question=question,
        answer=answer,
        turns=max(1, min(6, (ctx - system) // (answer + question + _QUESTION_TOKENS))),
        long_prompt=_within(prefill * _LONG_S, _LONG_MIN, min(_LONG_MAX, ctx - 8)),
        generation=_within(decode * _GENERATION_S, _GENERATION_MIN, min(_GENERATION_MAX, ctx // 2)),
        batch_prompts=max(4, 2 * slots),
        embedded=min(_EMBEDDED_MAX, ctx),
        slots=max(2, slots),
        context=ctx,
        tokens_per_word=max(one.tokens_per_word for one in variants),
    )


def _within(tokens: float, low: int, high: int) -> int:
    return max(1, min(max(round(tokens), low), high))
