"""Measures one variant on engines of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from supervisor.bench.instance import PrivateInstance, private_instance
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.engine_client.client import EngineUnreachable
from supervisor.errors import EngineFailed, StartFailed
from supervisor.host.paths import Directories
from supervisor.tune import engines
from supervisor.tune.goal import Figures, Goal
from supervisor.tune.plans import PlannedVariant, VariantPlans
from supervisor.tune.sizes import Sizes, sizes_of, smallest
from supervisor.tune.trials import Failure
from supervisor.tune.variant import Variant


class Measurements:
    """Measures variants of one model for one goal; sizes of requests follow its first answer."""

    def __init__(self, goal: Goal, plans: VariantPlans, directories: Directories) -> None:
        self._goal = goal
        self._plans = plans
        self._directories = directories
        self._prompt: list[int] = []
        self.sizes: Sizes | None = None

    async def measure(self, variant: Variant, limit_s: float) -> Figures | Failure:
        """Measure a variant within a time; all its engines have ended then."""
        if unusable := self._plans.reason_against(variant):
            return Failure(unusable.reason)
        try:
            async with asyncio.timeout(limit_s):
                return await self._measured(self._plans.plan(variant))
        except TimeoutError:
            return Failure(f"it took longer than {limit_s:.0f} s")
        except (StartFailed, EngineFailed) as error:
            return Failure(error.message)
        except (EngineUnreachable, WorkloadFailed) as error:
            return Failure(f"its engine did not answer as it should: {error}")

    async def _measured(self, planned: PlannedVariant) -> Figures:
        async with AsyncExitStack() as stack:
            running = [
                await stack.enter_async_context(private_instance(planned.plan, self._directories))
                for _ in range(planned.replicas)
            ]
            sizes = await self._sizes(running[0])
            if self._goal.name == "throughput":
                return await self._together(running, planned.plan.slots, sizes)
            return await self._alone(running, sizes)

    async def _alone(self, running: Sequence[PrivateInstance], sizes: Sizes) -> Figures:
        async with running[0].client() as client:
            found = await engines.answer(client, self._prompt[: sizes.prompt], sizes.answer)
        peaks = [one.peak_memory_bytes() for one in running]
        if self._goal.name == "memory" and None in peaks:
            raise WorkloadFailed("this system does not tell the peak memory of a process")
        return Figures(
            decode=1000 * found.decoded_tokens / found.decode_ms,
            first_token_s=found.prompt_ms / 1000,
            peak_bytes=sum(peak or 0 for peak in peaks),
        )

    async def _together(
        self, running: Sequence[PrivateInstance], slots: int, sizes: Sizes
    ) -> Figures:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(instance.client())
                for _ in range(slots)
                for instance in running
            ]
            # Each begins with another token, so that no stream uses the prompt of another.
            prompts = [
                self._prompt[number : number + sizes.prompt_together]
                for number in range(len(clients))
            ]
            total = await engines.total_rate(clients, prompts, sizes.answer_together)
        return Figures(total=total)

    async def _sizes(self, instance: PrivateInstance) -> Sizes:
        if self.sizes is None:
            async with instance.client() as client:
                ctx = self._plans.base.plan.ctx_size // self._plans.base.plan.slots
                least = smallest(ctx)
                self._prompt = await engines.long_prompt(client, 1024)
                first = await engines.answer(client, self._prompt[: least.prompt], least.answer)
            self.sizes = sizes_of(first, ctx)
        return self.sizes
