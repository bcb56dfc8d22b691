from collections.abc import Mapping
from pathlib import Path

import pytest
from samples import engine, machine, model

from supervisor.engines.help import FlagValue
from supervisor.flags.draft_model import Draft
from supervisor.flags.plan import ModelEntry, Plan, make_plan
from supervisor.flags.profile import load
from supervisor.host.paths import shipped
from supervisor.speculation.benefit import SpeculationBenefit, SpeculationConfig, Tokens
from supervisor.speculation.config import advice, speculation_config

SLOWER = SpeculationBenefit(Tokens(1000, 1000, 380), 31.2, 44.4, is_estimate=True)
FASTER = SpeculationBenefit(Tokens(1000, 1000, 900), 80.0, 44.4, is_estimate=True)


def planned(
    profile: str = "base",
    flags: Mapping[str, FlagValue] | None = None,
    draft_bytes: int = 0,
    build: str = "b10434",
) -> Plan:
    entry = ModelEntry("chat", Path("/models/chat.gguf"), flags=flags or {})
    draft = model(tensor_bytes=draft_bytes) if draft_bytes else None
    return make_plan(
        entry,
        load(profile, (shipped("profiles"),)),
        engine(build),
        model(tensor_bytes=300),
        machine(),
        instances=1,
        draft=Draft(draft),
    )


def test_a_model_without_a_draft_guesses_nothing() -> None:
    assert speculation_config(planned()) is None
    assert speculation_config(planned(flags={"spec-type": "none"}, draft_bytes=100)) is None


def test_a_draft_model_reads_along_by_its_size() -> None:
    assert speculation_config(planned(draft_bytes=100)) == SpeculationConfig(
        0.75, has_own_slots=True
    )
    assert speculation_config(planned(draft_bytes=100, build="b9109")) == SpeculationConfig(
        0.75, has_own_slots=True
    )


def test_looking_words_up_leaves_a_step_what_it_is() -> None:
    assert speculation_config(planned("speculative")) == SpeculationConfig(1.0, has_own_slots=True)
    shared = planned("speculative", {"kv-unified": True})
    assert speculation_config(shared) == SpeculationConfig(1.0, has_own_slots=False)


def test_a_draft_that_pays_needs_no_advice() -> None:
    assert advice(planned(draft_bytes=100), FASTER) is None


@pytest.mark.parametrize(
    ("plan", "what", "cure"),
    [
        (planned(draft_bytes=100), "the draft model", "take draft out of [models.chat]"),
        (
            planned("speculative"),
            "drafting by ngram-mod",
            'set spec-type = "none" in [models.chat.flags]',
        ),
    ],
    ids=["draft", "words"],
)
def test_one_that_does_not_is_told_with_its_figures(plan: Plan, what: str, cure: str) -> None:
    rates = "31 tokens/s with it, about 44 without (38% of what it drafts is accepted)"
    assert advice(plan, SLOWER) == (f"{what} makes chat slower: {rates}", cure)
