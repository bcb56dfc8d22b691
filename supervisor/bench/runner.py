"""Measures variants in interleaved rounds, each time on a fresh engine, with progress."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

import orjson

from supervisor.bench.figures import ENERGY, PEAK_MEMORY, READY, Variant
from supervisor.bench.own_engine import PrivateInstance, private_client, private_instance
from supervisor.bench.variants import VariantSpec
from supervisor.bench.workload import (
    Measured,
    MeasuredEngine,
    Outcome,
    Sizes,
    Workload,
    WorkloadFailed,
    choose_sizes,
    complete,
    rate,
    text,
    tokenize,
)
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.errors import CorralError, EngineFailed, StartFailed
from supervisor.output import ProgressMeter, duration
from supervisor.records.requests import RecordedRequest
from supervisor.system import energy
from supervisor.system.energy import EnergyReading
from supervisor.system.paths import Directories
from supervisor.system.processor_load import processor_load, read_this_processor

DEFAULT_REPEATS: Final = 5
_MOST_REPEATS: Final = 1000


class RoundLimits:
    """The number of rounds of a bench and, if set, its duration.

    With a duration alone, as many rounds as fit in it; with neither, five.
    """

    def __init__(self, repeats: int | None, minutes: float | None) -> None:
        self.repeats = repeats or (DEFAULT_REPEATS if minutes is None else _MOST_REPEATS)
        self.limit_s = None if minutes is None else 60 * minutes

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds, or None if the duration decides."""
        return self.repeats if self.limit_s is None else None

    def may_begin(self, done: int, elapsed_s: float, longest_s: float) -> bool:
        """Whether another round may begin after `done` complete ones; the first always may."""
        if done == 0 or self.limit_s is None:
            return done < self.repeats
        return done < self.repeats and elapsed_s + longest_s <= self.limit_s


_EVERY_S: Final = 0.5


class Progress:
    """Shows the steps of a bench, `steps` in each round, and estimates the remaining time."""

    def __init__(self, label: str, steps: int, limits: RoundLimits, meter: ProgressMeter) -> None:
        self._label = label
        self._steps = steps
        self._limits = limits
        self._meter = meter
        self._began_s = time.monotonic()
        self._round = 0
        self._step = ""
        self._done, self._done_s = 0, 0.0  # steps of rounds that are done, and when the last was

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def begin_round(self) -> None:
        if self._round == 0:
            self._began_s = time.monotonic()
        self._round += 1

    @contextmanager
    def step(self, variant: str, what: str) -> Iterator[None]:
        self._step = f"{variant}: {what}"
        self.show()
        yield
        if self._round:
            self.add(self.elapsed_s)

    def add(self, elapsed_s: float) -> None:
        """Note that a step of a round is done."""
        self._done, self._done_s = self._done + 1, elapsed_s

    def show(self) -> None:
        if not self._step:
            return
        if self._round == 0:
            self._meter.show(self._label, 0.0, f"first start · {self._step}")
            return
        elapsed_s = self.elapsed_s
        left_s = self.remaining_s(elapsed_s)
        planned = self._limits.planned_rounds
        number = f"round {self._round}" + (f" of {planned}" if planned else "")
        left = f"{duration(left_s)} left · " if left_s else ""
        share = elapsed_s / (elapsed_s + left_s) if left_s else 0.0
        self._meter.show(self._label, share, f"{left}{number} · {self._step}")

    def remaining_s(self, elapsed_s: float) -> float:
        """Estimate the remaining time by the mean of the steps so far; 0 before the first."""
        if not self._done:
            return 0.0
        ahead = self._steps * self._limits.repeats - self._done
        left_s = self._done_s / self._done * ahead - (elapsed_s - self._done_s)
        if self._limits.limit_s is not None:
            left_s = min(left_s, self._limits.limit_s - elapsed_s)
        return max(0.0, left_s)


@contextmanager
def ticking(show: Callable[[], None]) -> Iterator[None]:
    """Call `show` twice a second during the block."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        show()
        timer = loop.call_later(_EVERY_S, tick)

    timer = loop.call_later(_EVERY_S, tick)
    try:
        yield
    finally:
        timer.cancel()


_PROMPT_WORDS: Final = 48
_ANSWER_TOKENS: Final = 12
# The likely context of an older build's engine, which does not report it.
_CTX_SLOT: Final = 512


async def rehearse(spec: VariantSpec, directories: Directories) -> Measured:
    """Start a variant and send one short request.

    Raises StartFailed or EngineFailed if it does not run, WorkloadFailed if it rejects the request.
    """
    sample = text(Random(0), _PROMPT_WORDS)  # noqa: S311 (words of a prompt)
    async with private_client(spec.plan, directories) as client:
        slots, ctx_slot = await _slots(client)
        tokens = len(await tokenize(client, sample))
        prefill = decode = 0.0
        if not (spec.plan.embedding and spec.plan.embedding.is_only):
            timings = (await complete(client, sample, _ANSWER_TOKENS)).timings
            prefill = rate(timings.prompt_tokens, timings.prompt_ms) or 0.0
            decode = rate(timings.decoded_tokens, timings.decode_ms) or 0.0
    return Measured(prefill, decode, ctx_slot, slots, tokens / _PROMPT_WORDS)


async def _slots(client: EngineClient) -> tuple[int, int]:
    response = await client.get("/props")
    match orjson.loads(response.body) if response.error is None else None:
        case {"total_slots": int(slots), "default_generation_settings": {"n_ctx": int(ctx)}}:
            return max(1, slots), ctx or _CTX_SLOT
        case _:
            return 1, _CTX_SLOT


_START: Final = "start"
# Sizes are chosen so that a workload takes seconds; an engine that takes this long hangs.
_WORKLOAD_TIMEOUT_S: Final = 900.0


@dataclass(kw_only=True)
class Bench:
    """One bench; its results so far can be read at any time."""

    model: str
    specs: tuple[VariantSpec, ...]  # the variants to measure, by which `variants` is ordered too
    workloads: tuple[Workload, ...]
    limits: RoundLimits
    seed: int  # decides the texts and the order of variants
    directories: Directories
    meter: ProgressMeter
    recorded: Sequence[RecordedRequest] = ()
    read_energy: Callable[[], EnergyReading] = energy.read
    variants: dict[str, Variant] = field(init=False)  # the values found, round by round
    # Sentences for the reader, in order.
    notes: dict[str, None] = field(default_factory=dict)  # each once
    # The cores that other programs took during each measurement.
    others_cores: list[float] = field(default_factory=list)
    complete_rounds: int = 0

    def __post_init__(self) -> None:
        self.variants = {
            spec.name: Variant(spec.name, spec.profile, spec.argv) for spec in self.specs
        }
        steps = len(self.specs) * (1 + len(self.workloads))  # the first is the start
        self._progress = Progress(f"bench {self.model}", steps, self.limits, self.meter)

    @property
    def has_values(self) -> bool:
        return any(values for variant in self.variants.values() for values in variant.rounds)

    async def measure(self) -> None:
        """Measure until cancelled or done; raises CorralError if no variant runs."""
        with self.meter, ticking(self._progress.show):
            await self._rounds(await self._first_starts())

    async def _first_starts(self) -> Sizes:
        """Start each variant once, unmeasured, which brings its files into the page cache."""
        able: list[Measured] = []
        errors: list[CorralError] = []
        for spec in self.specs:
            try:
                with self._progress.step(spec.name, _START):
                    able.append(await rehearse(spec, self.directories))
            except (StartFailed, EngineFailed) as error:
                errors.append(error)
                self._give_up(spec, error)
            except (WorkloadFailed, EngineUnreachable) as error:
                hint = "corral plan shows its flags"
                errors.append(StartFailed(f"{spec.name}: {error}", hint=hint))
                self._give_up(spec, error)
        if not able:
            raise errors[0]
        return choose_sizes(able)

    def _give_up(self, spec: VariantSpec, error: Exception) -> None:
        hint = f"; {error.hint}" if isinstance(error, CorralError) and error.hint else ""
        self.variants[spec.name].failure = f"{error}{hint}"

    async def _rounds(self, sizes: Sizes) -> None:
        longest_s = 0.0
        while any(variant.failure is None for variant in self.variants.values()) and (
            self.limits.may_begin(self.complete_rounds, self._progress.elapsed_s, longest_s)
        ):
            began_s = time.monotonic()
            self._progress.begin_round()
            for variant in self.variants.values():
                variant.rounds.append({})
            for spec in order(self.specs, self.seed, self.complete_rounds):
                if self.variants[spec.name].failure is None:
                    await self._measure_variant(spec, sizes)
            self.complete_rounds += 1
            longest_s = max(longest_s, time.monotonic() - began_s)

    async def _measure_variant(self, spec: VariantSpec, sizes: Sizes) -> None:
        values = self.variants[spec.name].rounds[-1]
        try:
            async with AsyncExitStack() as stack:
                with self._progress.step(spec.name, _START):
                    starting = private_instance(spec.plan, self.directories)
                    instance = await stack.enter_async_context(starting)
                values[READY.name] = instance.ready_s
                await self._run_workloads(spec, instance, sizes, values)
        except (StartFailed, EngineFailed, EngineUnreachable) as error:
            self._give_up(spec, error)  # if unreachable, although its process still runs

    async def _run_workloads(
        self, spec: VariantSpec, instance: PrivateInstance, sizes: Sizes, values: dict[str, float]
    ) -> None:
        engine = MeasuredEngine(
            instance.client,
            sizes,
            self.model,
            names_slots=spec.plan.has_own_slots,
            recorded=self.recorded,
        )
        pids = (instance.pid, os.getpid())
        load_before, energy_before, tokens = read_this_processor(pids), self.read_energy(), 0
        for workload in self.workloads:
            with self._progress.step(spec.name, workload.name):
                found, computed = await self._outcome(spec, workload, engine)
            values.update(found)
            tokens += computed
        used = energy.energy_between(energy_before, self.read_energy())
        if used.total_j is not None and tokens:
            values[ENERGY.name] = 1000 * used.total_j / tokens
            self.notes[f"energy is that of the {used.covers}, for all programs"] = None
        load = processor_load(load_before, read_this_processor(pids))
        if load.others_cores is not None:
            self.others_cores.append(load.others_cores)
        if peak := instance.peak_memory_bytes():
            values[PEAK_MEMORY.name] = peak

    async def _outcome(
        self, spec: VariantSpec, workload: Workload, engine: MeasuredEngine
    ) -> Outcome:
        """Run a workload; note a failure, so that the next workload can run."""
        rng = Random(f"{self.seed}:{self.complete_rounds}:{workload.name}")  # noqa: S311
        try:
            async with asyncio.timeout(_WORKLOAD_TIMEOUT_S):
                return await workload.run(engine, rng)
        except TimeoutError:
            failure = f"not finished in {_WORKLOAD_TIMEOUT_S:g} s"
        except WorkloadFailed as error:
            failure = str(error)
        self.notes[f"{spec.name}, {workload.name}: {failure}"] = None
        return {}, 0


def order(specs: Sequence[VariantSpec], seed: int, number: int) -> list[VariantSpec]:
    """Return the order of variants in a round; it differs by round and depends on the seed."""
    return Random(f"{seed}:{number}").sample(specs, len(specs))  # noqa: S311 (an order)
