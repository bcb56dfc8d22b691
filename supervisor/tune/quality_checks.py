"""Checks the quality of variants on engines of their own, against the model with an f16 cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from supervisor.bench.instance import private_instance
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.errors import EngineFailed, StartFailed
from supervisor.flags.plan import Plan
from supervisor.host.paths import Directories
from supervisor.memory.kv_cache import UNQUANTISED
from supervisor.tune import quality
from supervisor.tune.plans import VariantPlans
from supervisor.tune.quality import LIMIT, Answer, Quality
from supervisor.tune.variant import BASE, Variant

# A variant may be this much further from the reference than the profile that it extends.
_MORE_THAN_BASE: Final = 1.25
# The cache is not rounded below f16, and nothing is drafted.
REFERENCE: Final = Variant(
    flags=(("cache-type-k", "f16"), ("cache-type-v", "f16"), ("spec-type", "none"))
)


class QualityChecks:
    """The checks of one search; `found` has what was seen of each variant."""

    def __init__(
        self, plans: VariantPlans, directories: Directories, tokens_each: Callable[[], int]
    ) -> None:
        """Prepare checks of so many tokens for each of the texts."""
        self._plans = plans
        self._directories = directories
        self._tokens_each = tokens_each
        self._reference: Sequence[Answer] = ()
        self.found: dict[Variant, Quality] = {}

    async def check(self, variant: Variant, limit_s: float) -> str | None:
        """Return why a variant is excluded, as a clause; None if it is as good as the profile."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._reason_against(variant)
        except TimeoutError:
            return "there was no time to check its quality"
        except (EngineFailed, EngineUnreachable, StartFailed, WorkloadFailed) as error:
            return f"its quality could not be checked: {error}"

    async def _reason_against(self, variant: Variant) -> str | None:
        reference_plan = self._plans.plan(REFERENCE).plan
        if not self._reference:
            async with self._client(reference_plan) as client:
                self._reference = await quality.record(client, self._tokens_each())
        limit = LIMIT
        if _has_rounded_cache(self._plans.base.plan):
            of_base = (await self._quality(BASE)).divergence or 0.0
            limit = max(limit, of_base * _MORE_THAN_BASE)
        return (await self._quality(variant)).reason_against(limit)

    async def _quality(self, variant: Variant) -> Quality:
        if variant not in self.found:
            plan = self._plans.plan(variant).plan
            async with self._client(plan) as client:
                self.found[variant] = await quality.compare(client, self._reference)
        return self.found[variant]

    @asynccontextmanager
    async def _client(self, plan: Plan) -> AsyncIterator[EngineClient]:
        async with (
            private_instance(plan, self._directories) as instance,
            instance.client() as client,
        ):
            yield client


def _has_rounded_cache(plan: Plan) -> bool:
    chosen = plan.memory_inputs.chosen
    types = {str(chosen.get(f"cache-type-{one}", "f16")) for one in "kv"}
    return not types <= UNQUANTISED
