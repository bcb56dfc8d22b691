"""Measures one variant of a search on separate engines, planned as the daemon will run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from proxy.upstream.upstream import Timings
from supervisor.bench.own_engine import PrivateInstance, private_instance
from supervisor.bench.tune_search import Figures, Goal
from supervisor.bench.tune_space import BASE, Variant
from supervisor.bench.workload import WorkloadFailed, clamp, post, rate, run_together, tokenize
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.errors import CorralError, EngineFailed, StartFailed
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import size
from supervisor.plan import tuned_profile
from supervisor.plan.fit import misfit_reason
from supervisor.plan.plan import Plan
from supervisor.plan.tuned_profile import Evidence, Tuned
from supervisor.settings.schema import Settings
from supervisor.system import machine
from supervisor.system.paths import Directories

# Other programs may free some.
NO_MEMORY: Final = "too little memory is free"


class VariantPlans:
    """The plans of one search; each is made once, so that all rounds measure the same."""

    def __init__(self, settings: Settings, directories: Directories, model: str) -> None:
        alone = settings.models[model].model_copy(update={"trial": None})
        self._settings = settings.model_copy(update={"models": {**settings.models, model: alone}})
        self._directories = directories
        self.model = model
        self._plans: dict[Variant, tuple[Plan, int]] = {}
        self.profile = settings.models[model].profile
        self.base = self.plan(BASE)

    def plan(self, variant: Variant) -> Plan:
        """Plan one instance of a variant; raises CorralError."""
        return self._plan(variant)[0]

    def replicas(self, variant: Variant) -> int:
        return self._plan(variant)[1]

    def _plan(self, variant: Variant) -> tuple[Plan, int]:
        if variant not in self._plans:
            planner = self._planner(variant)
            count = planner.replicas(self.model).count
            self._plans[variant] = planner.plan(self.model), count
        return self._plans[variant]

    def usable(self, variants: tuple[Variant, ...]) -> dict[Variant, str | None]:
        """Return why each variant is not measured (no memory, no change), or None if it is."""
        seen = {self._identity(BASE)}
        found: dict[Variant, str | None] = {}
        for variant in variants:
            found[variant] = self.reason_against(variant)
            if found[variant] is None:
                identity = self._identity(variant)
                found[variant] = "it changes nothing here" if identity in seen else None
                seen.add(identity)
        return found

    def reason_against(self, variant: Variant) -> str | None:
        """Return why a variant cannot be measured now, as a clause, or None."""
        try:
            plan = self.plan(variant)
        except CorralError as error:
            return error.message
        omitted = {line.flag.removeprefix("--").removeprefix("no-"): line.reason
                   for line in plan.omitted}  # fmt: skip
        for key, _ in variant.flags:
            if key in omitted:
                return omitted[key]
        return self._misfit(variant)

    def _misfit(self, variant: Variant) -> str | None:
        plan, replicas = self._plan(variant)
        found = plan.estimate
        capacity = self._planner(BASE).capacity(plan.engine)
        if reason := misfit_reason(found, capacity):
            return reason
        needed = found.own_at_start_bytes * replicas + found.mapped_bytes
        free = min(machine.read().memory_available_bytes, capacity.host)
        if needed > free:
            return f"{NO_MEMORY}: it needs {size(needed)} of main memory, and {size(free)} are free"
        return None

    def _planner(self, variant: Variant) -> LaunchPlanner:
        own = Tuned(
            model=self.model,
            path=Path(),
            extends=None,
            flags=MappingProxyType(dict(variant.flags)),
            replicas=variant.replicas,
            evidence=Evidence(),
        )

        def read(name: str) -> Tuned | None:
            if name == self.model:
                return own
            return tuned_profile.read(name, self._directories.tuned_profiles)

        return LaunchPlanner(self._settings, self._directories, read_tuned=read)

    def _identity(self, variant: Variant) -> tuple[int, frozenset[tuple[str, str | None]]]:
        plan, replicas = self._plan(variant)
        return replicas, frozenset((line.flag, line.value) for line in plan.lines)


# Texts of several kinds, as clients send them.
_FILE: Final = Path(__file__).with_name("texts.txt")
TEXTS: Final = tuple(_FILE.read_text("ascii").strip("\n").split("\n----\n"))
LONG_TEXT: Final = "\n\n".join(TEXTS)


_PROMPT_MAX, _PROMPT_S = 500, 5.0
_ANSWER_MIN, _ANSWER_MAX, _ANSWER_S = 16, 96, 0.8
_TOGETHER_MIN, _TOGETHER_MAX, _TOGETHER_S = 8, 40, 0.4
_QUALITY_MIN, _QUALITY_MAX, _QUALITY_S = 8, 40, 0.8
_TOGETHER_PROMPT: Final = 32
_LEAST: Final = 16
_PROMPT_TOKENS: Final = 1024
# Used if the engine chooses the context; the model's context is long enough.
_CTX: Final = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of requests, in tokens."""

    prompt: int
    answer: int
    prompt_together: int
    answer_together: int
    quality: int  # generated for each text


def sizes_of(first: Timings, ctx_slot: int) -> Sizes:
    """Return sizes for an engine of these speeds; all variants get the same."""
    prefill = 1000 * first.prompt_tokens / max(1.0, first.prompt_ms)
    decode = 1000 * first.decoded_tokens / max(1.0, first.decode_ms)
    room = ctx_slot or _CTX
    answer = min(clamp(decode * _ANSWER_S, _ANSWER_MIN, _ANSWER_MAX), max(1, room // 4))
    together = clamp(decode * _TOGETHER_S, _TOGETHER_MIN, _TOGETHER_MAX)
    return Sizes(
        prompt=min(clamp(prefill * _PROMPT_S, 4 * _LEAST, _PROMPT_MAX), max(1, room // 2)),
        answer=answer,
        prompt_together=min(_TOGETHER_PROMPT, max(1, room // 4)),
        answer_together=min(together, max(1, room // 4)),
        quality=clamp(decode * _QUALITY_S, _QUALITY_MIN, _QUALITY_MAX),
    )


# Not greedy: a small model would repeat itself, and drafts from the text would profit from that.
_SAMPLED: Final[Mapping[str, Any]] = {
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
    "cache_prompt": False,
    "return_tokens": False,
}


async def answer(client: EngineClient, prompt: Sequence[int], tokens: int) -> Timings:
    """Generate exactly this many tokens; not streamed, so that nothing competes for the cores."""
    body = {"prompt": prompt, "n_predict": tokens, **_SAMPLED}
    found = orjson.loads(await post(client, "/completion", body))
    timings = Timings.read(found.get("timings"))
    if timings is None or not rate(timings.decoded_tokens, timings.decode_ms):
        raise WorkloadFailed("/completion answered without timings")
    return timings


class Measurements:
    """Measures variants of one model for one goal; the first answer decides the request sizes."""

    def __init__(self, goal: Goal, plans: VariantPlans, directories: Directories) -> None:
        self._goal = goal
        self._plans = plans
        self._directories = directories
        self._prompt: list[int] = []
        self.sizes: Sizes | None = None

    async def measure(self, variant: Variant, limit_s: float) -> Figures | str:
        """Measure a variant within `limit_s`; its engines have ended when this returns."""
        if reason := self._plans.reason_against(variant):
            return reason
        try:
            async with asyncio.timeout(limit_s):
                return await self._measure(variant)
        except TimeoutError:
            return f"it took longer than {limit_s:.0f} s"
        except (StartFailed, EngineFailed) as error:
            return error.message
        except (EngineUnreachable, WorkloadFailed) as error:
            return f"its engine did not answer as it should: {error}"

    async def _measure(self, variant: Variant) -> Figures:
        plan = self._plans.plan(variant)
        async with AsyncExitStack() as stack:
            running = [
                await stack.enter_async_context(private_instance(plan, self._directories))
                for _ in range(self._plans.replicas(variant))
            ]
            sizes = await self._sizes(running[0])
            if self._goal.name == "throughput":
                return await self._measure_together(running, plan.slots, sizes)
            return await self._measure_alone(running, sizes)

    async def _measure_alone(self, running: Sequence[PrivateInstance], sizes: Sizes) -> Figures:
        async with running[0].client() as client:
            found = await answer(client, self._prompt[: sizes.prompt], sizes.answer)
        peaks = [engine.peak_memory_bytes() for engine in running]
        if self._goal.name == "memory" and None in peaks:
            raise WorkloadFailed("peak memory of a process is not available on this system")
        return Figures(
            decode=1000 * found.decoded_tokens / found.decode_ms,
            first_token_s=found.prompt_ms / 1000,
            peak_bytes=sum(peak or 0 for peak in peaks),
        )

    async def _measure_together(
        self, running: Sequence[PrivateInstance], slots: int, sizes: Sizes
    ) -> Figures:
        tokens = sizes.answer_together
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(instance.client())
                for _ in range(slots)
                for instance in running
            ]
            began_at_s = time.perf_counter()
            # Each prompt begins with another token, so that no stream reuses another's prompt.
            found = await run_together(
                [
                    answer(client, self._prompt[at : at + sizes.prompt_together], tokens)
                    for at, client in enumerate(clients)
                ]
            )
            took_s = max(1e-6, time.perf_counter() - began_at_s)
        return Figures(total=sum(timings.decoded_tokens for timings in found) / took_s)

    async def _sizes(self, instance: PrivateInstance) -> Sizes:
        if self.sizes is None:
            ctx = self._plans.base.ctx_size // self._plans.base.slots
            # The speed of the first request decides the sizes of the others.
            least = max(1, min(4 * _LEAST, (ctx or _CTX) // 2 - 1))
            async with instance.client() as client:
                text = await tokenize(client, LONG_TEXT, add_special=True)
                self._prompt = (text * (_PROMPT_TOKENS // len(text) + 1))[:_PROMPT_TOKENS]
                first = await answer(client, self._prompt[:least], min(_LEAST, least))
            self.sizes = sizes_of(first, ctx)
        return self.sizes
