"""The comparison of answers: of plain numbers, and of a real engine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.bench import tune
from supervisor.bench.tune import LIMIT, Quality, QualityChecks, kl_divergence
from supervisor.bench.tune_space import BASE, Variant
from supervisor.system.paths import Directories


def logs(**probabilities: float) -> dict[int, float]:
    return {ord(token): math.log(p) for token, p in probabilities.items()}


def test_equal_distributions_do_not_diverge() -> None:
    assert kl_divergence(logs(a=0.6, b=0.3), logs(a=0.6, b=0.3)) == pytest.approx(0)


def test_the_divergence_is_that_of_the_definition() -> None:
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(logs(a=0.5, b=0.5), logs(a=0.25, b=0.75)) == pytest.approx(
        expected, abs=1e-4
    )


def test_a_token_that_is_missing_counts_as_the_least_probable_one() -> None:
    near = kl_divergence(logs(a=0.7, b=0.2), logs(a=0.7, c=0.2))
    far = kl_divergence(logs(a=0.7, b=0.2), logs(a=0.7, c=0.01))
    assert 0 <= near < far


def test_a_quality_is_told_in_words() -> None:
    assert str(Quality(200, 200, 0.00001)).startswith("answers equal on 200 tokens")
    assert "5 of them differ" in str(Quality(195, 200, 0.002))
    assert str(Quality(8, 10, None)) == "8 of 10 tokens equal"


def test_other_tokens_are_no_loss_and_another_distribution_is() -> None:
    assert Quality(150, 200, LIMIT / 2).reason_against() is None
    assert "the limit is 0.02" in (Quality(199, 200, LIMIT * 2).reason_against() or "")
    assert Quality(150, 200, None).reason_against() is None


@pytest.mark.parametrize(
    ("cache", "base", "accepted", "rejected"),
    [
        ("q8_0", 0.08, 0.099, 0.101),
        ("q8_0", 0.004, 0.019, 0.021),
        ("f16", 0.08, 0.019, 0.021),
    ],
)
async def test_a_variant_of_a_profile_with_a_rounded_cache_may_differ_as_much_as_that(
    cache: str,
    base: float,
    accepted: float,
    rejected: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = Variant(flags=(("threads", 1),)), Variant(flags=(("threads", 2),))
    divergences = {BASE: base, good: accepted, bad: rejected}

    @asynccontextmanager
    async def private_client(variant: Variant, _: object) -> AsyncIterator[Variant]:
        yield variant

    async def record(*_: object) -> str:
        return "the reference"

    async def compare(variant: Variant, _: object) -> Quality:
        return Quality(190, 200, divergences[variant])

    for replacement in (private_client, record, compare):
        monkeypatch.setattr(tune, replacement.__name__, replacement)
    chosen = SimpleNamespace(chosen={"cache-type-k": cache})
    plans: Any = SimpleNamespace(
        plan=lambda variant: variant, base=SimpleNamespace(memory_inputs=chosen)
    )
    checks = QualityChecks(plans, Directories(*[tmp_path] * 5), lambda: 4)
    assert await checks.check(good, 60) is None
    assert "its answers change too much" in (await checks.check(bad, 60) or "")
