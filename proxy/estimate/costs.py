"""What an engine's passes take. Pure.

A pass computes one token of each answer, and as many tokens of prompts as its batch has room for.
A token takes longer the more stand before it, and so does a pass, however few of a prompt it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What a prompt consists of: itself, its tokens, those before each token, those before each pass.
PromptRow = tuple[float, float, float, float]
# What a pass with answers consists of: itself, the answers, the tokens before each.
AnswerRow = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds.

    Attributes:
        prompt: For what `PromptRow` has.
        answer: For what `AnswerRow` has.
        overhead_s: From the lease of a slot until an idle engine begins with the prompt.
    """

    prompt: PromptRow
    answer: AnswerRow
    overhead_s: float = 0.0

    def prompt_s(self, row: PromptRow) -> float:
        return sum(a * b for a, b in zip(self.prompt, row, strict=True))

    def answer_s(self, row: AnswerRow) -> float:
        return sum(a * b for a, b in zip(self.answer, row, strict=True))


def prompt_row(tokens: float, depth: float, batch_tokens: int, prompts: float = 1.0) -> PromptRow:
    """Return what tokens behind `depth` others consist of; `prompts` is their share of a prompt."""
    passes = math.ceil(tokens / batch_tokens)
    before_passes = passes * depth + batch_tokens * passes * (passes - 1) / 2
    return prompts, tokens, tokens * (depth + tokens / 2), before_passes
