"""What an engine's passes take. Pure.

A pass computes one token of each answer, and as many tokens of prompts as its batch has room for.
A token of a prompt takes longer the more stand before it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds.

    Attributes:
        prompt_s: Of a prompt, whatever its length.
        token_s: Of each of its tokens.
        depth_s: Of each of its tokens for each token before it.
        pass_s: Of a pass that computes answers only.
        answer_s: Of each answer in a pass.
        overhead_s: From the lease of a slot until an idle engine begins with the prompt.
    """

    prompt_s: float
    token_s: float
    depth_s: float
    pass_s: float
    answer_s: float
    overhead_s: float

    def tokens_s(self, tokens: int, depth: int) -> float:
        """Return the time of tokens of a prompt behind `depth` others."""
        return tokens * self.token_s + weighted_depth(tokens, depth) * self.depth_s


def weighted_depth(tokens: float, depth: float) -> float:
    """Return the sum over some tokens of how many stand before each."""
    return tokens * (depth + tokens / 2)
