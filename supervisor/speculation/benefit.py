"""Whether guessing tokens ahead pays, by what a guess costs and how many come true. Pure.

Of an answer of N tokens, A were guessed. So it took N - A steps, and the making and checking of all
that was guessed, D tokens. With what each costs in an engine that does nothing else, and with the
N, A and D of real answers, how fast a sequence is with and without is known, whatever else the
engine did meanwhile and however long the prompts were.

A request cannot ask not to be guessed for. But the last token that it may make is never guessed: a
request for two is answered without. With a draft model even that is slower than it would be alone,
because the draft reads along; its part is told by the size of the two.

Source: measured on build 10434, where a request's `speculative.n_max` and its like change nothing;
with a model as its own draft a step took 14.3 ms, without 7.1. llama.cpp, tools/server,
server_slot::get_n_draft_max.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Less is one answer, which may be any text.
_TOKENS_MIN: Final = 512
# Two engines that are alike differ by this much, measured one after the other.
_MARGIN: Final = 0.9


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How an engine guesses.

    Attributes:
        own_share: The part of a step that is the model's own, above 0 to 1; the rest is that of a
            draft model which reads along.
        has_own_slots: Whether a request may name its slot.
    """

    own_share: float = 1.0
    has_own_slots: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of some answers.

    Attributes:
        decoded: All that were generated.
        drafted: Those that were guessed.
        accepted: Those of them that came true.
    """

    decoded: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        """Return those of both."""
        return Tokens(
            self.decoded + other.decoded,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    def __sub__(self, other: Tokens) -> Tokens:
        """Return those that are not the other's."""
        return self + Tokens(-other.decoded, -other.drafted, -other.accepted)

    @property
    def acceptance(self) -> float | None:
        """Return the share of guesses that came true, 0 to 1; None where nothing was guessed."""
        return self.accepted / self.drafted if self.drafted > 0 else None


@dataclass(frozen=True, slots=True)
class SpeculationCost:
    """What one sequence costs an engine that does nothing else.

    Attributes:
        step_ms: A step in which nothing is guessed.
        draft_ms: What making and checking one guessed token adds to a step.
    """

    step_ms: float
    draft_ms: float


@dataclass(frozen=True, slots=True)
class SpeculationBenefit:
    """What guessing does to an engine.

    Attributes:
        tokens: Of the answers it is judged by.
        with_tps: Tokens a second that one sequence alone gets with it.
        without_tps: The same without it.
        is_estimate: Whether the latter is worked out from the size of the models.
    """

    tokens: Tokens
    with_tps: float
    without_tps: float
    is_estimate: bool

    @property
    def is_slower(self) -> bool:
        """Return whether answers would come faster without it, beyond doubt."""
        return self.with_tps < _MARGIN * self.without_tps


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What guessing has brought in one run.

    Attributes:
        tokens: Of all answers to clients so far.
        verdict: What it does, by the latest of them; None before there were enough.
    """

    tokens: Tokens = Tokens()
    verdict: SpeculationBenefit | None = None


def estimate_benefit(
    drafting: SpeculationConfig, costs: SpeculationCost, tokens: Tokens
) -> SpeculationBenefit | None:
    """Judge by some answers; None where they are too few."""
    if tokens.decoded < _TOKENS_MIN:
        return None
    steps = tokens.decoded - tokens.accepted
    duration_ms = steps * costs.step_ms + tokens.drafted * costs.draft_ms
    return SpeculationBenefit(
        tokens=tokens,
        with_tps=1000 * tokens.decoded / duration_ms,
        without_tps=1000 / (costs.step_ms * drafting.own_share),
        is_estimate=drafting.own_share < 1,
    )
