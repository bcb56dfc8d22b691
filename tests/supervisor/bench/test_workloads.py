"""The requests of workloads to the real engine, and their figures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest
from support import tiny_bert

from supervisor.bench.own_engine import PrivateInstance, private_instance
from supervisor.bench.standard_workloads import WORKLOADS
from supervisor.bench.workload import (
    WORDS,
    Measured,
    MeasuredEngine,
    Sizes,
    WorkloadFailed,
    choose_sizes,
    complete,
    run_together,
    text,
)
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

SIZES = Sizes(
    system=24,
    question=8,
    answer=6,
    turns=3,
    long_prompt=200,
    generation=20,
    batch_prompts=5,
    embedded=32,
    slots=2,
    context=384,
    tokens_per_word=4.0,
)


def measured(instance: PrivateInstance) -> MeasuredEngine:
    return MeasuredEngine(instance.client, SIZES, "tiny")


@pytest.fixture
async def generating(tiny_model: Path, runtime: Path) -> AsyncIterator[MeasuredEngine]:
    where = Directories(*[runtime] * 5)
    settings = Settings(models={"tiny": {"path": tiny_model, "flags": {"parallel": 2}}})
    plan = LaunchPlanner(settings, where).plan("tiny")
    assert plan.has_own_slots
    async with private_instance(plan, where) as one:
        yield replace(measured(one), names_slots=True)


async def test_workloads_find_every_figure_that_they_list(generating: MeasuredEngine) -> None:
    for workload in WORKLOADS.values():
        if workload.for_embedding or workload.unavailable("tiny", []):
            continue
        values, tokens = await workload.run(generating, Random(1))
        assert set(values) == {figure.name for figure in workload.figures}, workload.name
        assert all(value > 0 for value in values.values())
        assert tokens > 0


async def test_an_embedding_model_embeds(tmp_path: Path, runtime: Path) -> None:
    where = Directories(*[runtime] * 5)
    settings = Settings(models={"tiny": {"path": tiny_bert.make(tmp_path / "b.gguf", "mean")}})
    plan = LaunchPlanner(settings, where).plan("tiny")
    workload = WORKLOADS["embedding"]
    async with private_instance(plan, where) as one:
        values, _ = await workload.run(measured(one), Random(1))
    assert set(values) == {figure.name for figure in workload.figures}


async def test_a_conversation_computes_only_new_tokens(generating: MeasuredEngine) -> None:
    generating = replace(generating, sizes=replace(SIZES, system=400))
    named, _ = await WORKLOADS["chat"].run(generating, Random(1))
    unnamed, _ = await WORKLOADS["chat"].run(replace(generating, names_slots=False), Random(2))
    computed, again = (values["chat.prompt_tokens"] for values in (named, unnamed))
    # With the system prompt of the first conversation, and without that of a turn before.
    assert computed < 0.6 * again


async def test_answers_have_the_size_that_was_asked_for(generating: MeasuredEngine) -> None:
    async with generating.client() as client:
        reply = await complete(client, text(Random(1), 5), 9)
    assert reply.timings.decoded_tokens == 9
    assert reply.first_token_ms > 0


async def test_a_rejected_request_is_a_failure_in_the_engines_words(
    generating: MeasuredEngine,
) -> None:
    async def ask(words: int) -> None:
        async with generating.client() as client:
            await complete(client, text(Random(1), words), 1)

    with pytest.raises(WorkloadFailed, match=r"status 400, .*exceed"):
        await run_together([ask(5), ask(5000)])


def test_equal_generators_make_equal_texts() -> None:
    assert text(Random(3), 20) == text(Random(3), 20) != text(Random(4), 20)
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("decode_rate", [0.0, 1.0, 100.0, 10_000.0])
@pytest.mark.parametrize("ctx_slot", [128, 512, 4096, 131_072])
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_every_request_fits_into_the_context(decode_rate: float, ctx_slot: int, slots: int) -> None:
    sizes = choose_sizes([Measured(10 * decode_rate, decode_rate, ctx_slot, slots, 1.4)])
    turn = sizes.question + sizes.answer
    assert sizes.system + sizes.turns * turn <= ctx_slot
    assert sizes.question + sizes.generation <= ctx_slot
    assert sizes.long_prompt < ctx_slot
    assert sizes.embedded <= ctx_slot
    assert min(sizes.turns, sizes.system, sizes.answer, sizes.question) >= 1


def test_the_smallest_context_and_the_fastest_variant_decide() -> None:
    slow, fast = Measured(10, 2, 4096, 1, 1.2), Measured(1000, 100, 1024, 4, 1.2)
    sizes = choose_sizes([slow, fast])
    assert sizes.slots == 4
    assert sizes.generation == 200
    assert sizes.long_prompt < 1024


def test_the_registry_names_workloads_and_figures_alike() -> None:
    assert isinstance(WORKLOADS, MappingProxyType)
    figures = [figure for workload in WORKLOADS.values() for figure in workload.figures]
    assert len({figure.name for figure in figures}) == len(figures)
    for name, workload in WORKLOADS.items():
        assert {figure.workload for figure in workload.figures} == {name} == {workload.name}
