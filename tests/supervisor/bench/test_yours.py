"""Recorded requests are replayed on the real engine."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from supervisor.bench.own_engine import private_instance
from supervisor.bench.standard_workloads import WORKLOADS
from supervisor.bench.workload import Measured, MeasuredEngine, WorkloadFailed, choose_sizes
from supervisor.fleet.planner import LaunchPlanner
from supervisor.records.requests import RecordedRequest
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories

SIZES = choose_sizes([Measured(500, 50, 512, 2, 4.0)])


def turns(*given: tuple[int, int]) -> list[RecordedRequest]:
    """Return a request a second, by conversations and prompts."""
    return [
        RecordedRequest(1, conversation, at, at + 0.5, prompt, 0, 5)
        for at, (conversation, prompt) in enumerate(given)
    ]


@pytest.fixture
async def engine(tiny_model: Path, runtime: Path) -> AsyncIterator[MeasuredEngine]:
    where = Directories(*[runtime] * 5)
    flags = {"parallel": 2, "ctx-size": 1024}
    settings = Settings(models={"tiny": {"path": tiny_model, "flags": flags}})
    async with private_instance(LaunchPlanner(settings, where).plan("tiny"), where) as one:
        yield MeasuredEngine(one.client, SIZES, "tiny")


async def test_sizes_are_exact_and_turns_go_on_in_the_cache(engine: MeasuredEngine) -> None:
    recorded = turns((1, 40), (2, 30), (1, 60), (2, 50), (1, 80))
    values, tokens = await WORKLOADS["yours"].run(replace(engine, recorded=recorded), Random(1))
    assert set(values) == {figure.name for figure in WORKLOADS["yours"].figures}
    # The first prompts of both, then what was new: 60 - 40 - 5 and so on; the engine computes the
    # last token of a prompt again, and one that it had not stored of an answer.
    computed = values["yours.prompt_tokens"]
    new = 40 + 30 + 15 + 15 + 15
    assert new <= computed <= new + 2 * 3
    assert tokens == computed + 5 * 5


async def test_more_conversations_than_slots_are_found_in_the_cache(
    engine: MeasuredEngine,
) -> None:
    """A slot is named only while it holds the conversation: else the engine would not look."""
    recorded = turns(*((number, prompt) for prompt in (40, 60, 80) for number in (1, 2, 3)))
    values, _ = await WORKLOADS["yours"].run(
        replace(engine, names_slots=True, recorded=recorded), Random(1)
    )
    new = 3 * (40 + 15 + 15)
    assert new <= values["yours.prompt_tokens"] <= new + 3 * 3


async def test_without_a_record_nothing_is_replayed(engine: MeasuredEngine) -> None:
    reason = WORKLOADS["yours"].unavailable("tiny", [])
    assert reason is not None
    assert reason.startswith("0 requests are recorded of tiny, and 8 are needed")
    with pytest.raises(WorkloadFailed, match="no request of tiny is recorded"):
        await WORKLOADS["yours"].run(engine, Random(1))
    assert "1 request is recorded" in (WORKLOADS["yours"].unavailable("tiny", turns((1, 40))) or "")
    assert WORKLOADS["yours"].unavailable("tiny", turns(*[(1, 40)] * 8)) is None
