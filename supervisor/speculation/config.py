"""How the engine of a plan guesses tokens ahead, and what to do where that does not pay. Pure."""

from __future__ import annotations

from supervisor.flags.plan import Plan
from supervisor.flags.speculation import kinds
from supervisor.speculation.benefit import SpeculationBenefit, SpeculationConfig


def speculation_config(plan: Plan) -> SpeculationConfig | None:
    """Return how the engine of a plan guesses; None where it does not.

    A step costs about as much as there are weights to be read, those of the draft model included.
    """
    if not kinds(plan.memory_inputs.chosen):
        return None
    model, draft = plan.gguf, _draft_bytes(plan)
    return SpeculationConfig(model.tensor_bytes / (model.tensor_bytes + draft), plan.has_own_slots)


def advice(plan: Plan, verdict: SpeculationBenefit) -> tuple[str, str] | None:
    """Return what is wrong with the guessing and what to do about it; None where nothing is."""
    if not verdict.is_slower:
        return None
    if plan.memory_inputs.draft:
        what, cure = "the draft model", f"take draft out of [models.{plan.model}]"
    else:
        what = f"drafting by {' and '.join(kinds(plan.memory_inputs.chosen))}"
        cure = f'set spec-type = "none" in [models.{plan.model}.flags]'
    about = "about " if verdict.is_estimate else ""
    rates = f"{verdict.with_tps:.0f} tokens/s with it, {about}{verdict.without_tps:.0f} without"
    accepted = f"{verdict.tokens.acceptance or 0:.0%} of what it drafts is accepted"
    return f"{what} makes {plan.model} slower: {rates} ({accepted})", cure


def _draft_bytes(plan: Plan) -> int:
    """Return the weights of the model that reads along; 0 where none does."""
    draft = plan.memory_inputs.draft
    reads_along = any(kind.startswith("draft") for kind in kinds(plan.memory_inputs.chosen))
    return draft.tensor_bytes if draft and reads_along else 0
