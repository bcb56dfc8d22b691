"""Measures variants in interleaved rounds, each time on a fresh engine, with progress."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

import orjson

from supervisor.bench.engine_requests import complete, post, rate, text
from supervisor.bench.figures import ENERGY, PEAK_MEMORY, READY, Values
from supervisor.bench.own_engine import PrivateInstance, private_instance
from supervisor.bench.variants import VariantSpec
from supervisor.bench.workload import (
    Measured,
    MeasuredEngine,
    Outcome,
    Sizes,
    Workload,
    WorkloadFailed,
    choose_sizes,
)
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.errors import CorralError, EngineFailed, StartFailed
from supervisor.output import ProgressMeter, duration
from supervisor.system import energy
from supervisor.system.energy import Energy, EnergyReading
from supervisor.system.paths import Directories
from supervisor.system.processor_load import processor_load, read_this_processor

DEFAULT_REPEATS: Final = 5
_MOST_REPEATS: Final = 1000


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The limits of a bench: its number of rounds and, if set, its duration."""

    repeats: int
    limit_s: float | None

    @classmethod
    def from_options(cls, repeats: int | None, minutes: float | None) -> RoundLimits:
        """With a duration alone, as many rounds as fit in it; with neither, five."""
        if minutes is None:
            return cls(repeats or DEFAULT_REPEATS, None)
        return cls(repeats or _MOST_REPEATS, 60 * minutes)

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds, or None if the duration decides."""
        return self.repeats if self.limit_s is None else None

    def may_begin(self, done: int, elapsed_s: float, longest_s: float) -> bool:
        """Whether another round may begin after `done` complete ones; the first always may."""
        if done == 0 or self.limit_s is None:
            return done < self.repeats
        return done < self.repeats and elapsed_s + longest_s <= self.limit_s


class Measurements:
    """The values of each variant, round by round."""

    def __init__(self, variants: Iterable[str]) -> None:
        self._rounds: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        self._failures: dict[str, str] = {}
        self._notes: dict[str, None] = {}  # in order, each once
        self._others_cores: list[float] = []
        self.complete_rounds = 0

    def begin_round(self) -> None:
        for rounds in self._rounds.values():
            rounds.append({})

    def end_round(self) -> None:
        self.complete_rounds += 1

    def add(self, variant: str, values: Mapping[str, float]) -> None:
        self._rounds[variant][-1].update(values)

    def give_up(self, variant: str, reason: str) -> None:
        self._failures.setdefault(variant, reason)

    def note(self, text: str) -> None:
        self._notes[text] = None

    def add_load(self, others_cores: float | None) -> None:
        if others_cores is not None:
            self._others_cores.append(others_cores)

    @property
    def others_cores(self) -> tuple[float, ...]:
        return tuple(self._others_cores)

    @property
    def has_values(self) -> bool:
        return any(values for rounds in self._rounds.values() for values in rounds)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def running(self) -> tuple[str, ...]:
        """The variants that were not given up."""
        return tuple(name for name in self._rounds if name not in self._failures)

    def rounds(self, variant: str) -> tuple[Values | None, ...]:
        return tuple(dict(values) or None for values in self._rounds[variant])

    def failure(self, variant: str) -> str | None:
        return self._failures.get(variant)


_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a round: the start of a variant, or one of its workloads."""

    variant: str
    what: str


class Timeline:
    """Estimates the remaining time from the duration of earlier steps."""

    def __init__(self, round_steps: Sequence[Step], limits: RoundLimits) -> None:
        self._round = round_steps
        self._limits = limits
        self._took_s: dict[Step, list[float]] = defaultdict(list)
        self._done: list[Step] = []  # in the current round

    def begin_round(self) -> None:
        self._done.clear()

    def add(self, step: Step, took_s: float) -> None:
        self._took_s[step].append(took_s)
        self._done.append(step)

    def remaining_s(self, rounds_done: int, step: Step, step_s: float, elapsed_s: float) -> float:
        """Estimate the remaining time; `step` has run for `step_s`. Never negative."""
        ahead = [other for other in self._round if other not in self._done and other != step]
        present_s = max(0.0, self._mean_s(step) - step_s)
        rest_s = present_s + sum(map(self._mean_s, ahead))
        round_s = sum(map(self._mean_s, self._round))
        further = max(0, self._limits.repeats - rounds_done - 1)
        if self._limits.limit_s is None:
            return rest_s + further * round_s
        left_s = self._limits.limit_s - elapsed_s - rest_s
        fitting = min(further, int(left_s / round_s) if round_s > 0 else 0)
        return rest_s + max(0, fitting) * round_s

    def _mean_s(self, step: Step) -> float:
        """The mean over this step's runs, or the same step of other variants, or all steps."""
        same = [s for other, took in self._took_s.items() if other.what == step.what for s in took]
        every = [s for took in self._took_s.values() for s in took]
        found = self._took_s.get(step) or same or every
        return statistics.fmean(found) if found else 0.0


class Progress:
    """Shows the steps of a bench."""

    def __init__(
        self, label: str, timeline: Timeline, limits: RoundLimits, meter: ProgressMeter
    ) -> None:
        self._label = label
        self._timeline = timeline
        self._limits = limits
        self._meter = meter
        self._began_s = self._step_began_s = time.monotonic()
        self._round = 0
        self._step: Step | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def begin_round(self) -> None:
        if self._round == 0:
            self._began_s = time.monotonic()
        self._round += 1
        self._timeline.begin_round()

    @contextmanager
    def step(self, variant: str, what: str) -> Iterator[None]:
        self._step, self._step_began_s = Step(variant, what), time.monotonic()
        self.show()
        yield
        self._timeline.add(self._step, time.monotonic() - self._step_began_s)

    def show(self) -> None:
        if self._step is None:
            return
        step_s = time.monotonic() - self._step_began_s
        what = f"{self._step.variant}: {self._step.what}"
        if self._round == 0:
            self._meter.show(self._label, 0.0, f"first start · {what}")
            return
        left_s = self._timeline.remaining_s(self._round - 1, self._step, step_s, self.elapsed_s)
        whole_s = self.elapsed_s + left_s
        planned = self._limits.planned_rounds
        number = f"round {self._round}" + (f" of {planned}" if planned else "")
        left = f"{duration(left_s)} left · " if left_s else ""
        self._meter.show(
            self._label, self.elapsed_s / whole_s if whole_s else 0.0, f"{left}{number} · {what}"
        )


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
    async with private_instance(spec.plan, directories) as instance, instance.client() as client:
        slots, ctx_slot = await _slots(client)
        tokens = await _count(client, sample)
        generates = not (spec.plan.embedding and spec.plan.embedding.is_only)
        prefill, decode = await _rates(client, sample) if generates else (0.0, 0.0)
    return Measured(prefill, decode, ctx_slot, slots, tokens / _PROMPT_WORDS)


async def _slots(client: EngineClient) -> tuple[int, int]:
    response = await client.get("/props")
    match orjson.loads(response.body) if response.error is None else None:
        case {"total_slots": int(slots), "default_generation_settings": {"n_ctx": int(ctx)}}:
            return max(1, slots), ctx or _CTX_SLOT
        case _:
            return 1, _CTX_SLOT


async def _count(client: EngineClient, sample: str) -> int:
    answer = orjson.loads(await post(client, "/tokenize", {"content": sample}))
    match answer:
        case {"tokens": [*tokens]} if tokens:
            return len(tokens)
        case _:
            raise WorkloadFailed("/tokenize: an answer without tokens")


async def _rates(client: EngineClient, sample: str) -> tuple[float, float]:
    reply = await complete(client, sample, _ANSWER_TOKENS)
    timings = reply.timings
    return (
        rate(timings.prompt_tokens, timings.prompt_ms) or 0.0,
        rate(timings.decoded_tokens, timings.decode_ms) or 0.0,
    )


_START: Final = "start"
# Sizes are chosen so that a workload takes seconds; an engine that takes this long hangs.
_WORKLOAD_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class BenchJob:
    """The task of a bench; `seed` decides the texts and the order of variants."""

    model: str
    specs: tuple[VariantSpec, ...]
    workloads: tuple[Workload, ...]
    limits: RoundLimits
    seed: int
    directories: Directories
    read_energy: Callable[[], EnergyReading] = energy.read


async def measure(job: BenchJob, found: Measurements, meter: ProgressMeter) -> None:
    """Measure into `found`, until cancelled or done; raises CorralError if no variant runs."""
    whats = (_START, *(workload.name for workload in job.workloads))
    steps = [Step(spec.name, what) for spec in job.specs for what in whats]
    timeline = Timeline(steps, job.limits)
    progress = Progress(f"bench {job.model}", timeline, job.limits, meter)
    try:
        with ticking(progress.show):
            sizes = await _first_starts(job, found, progress)
            await _rounds(_Run(job, sizes, found, progress))
    finally:
        meter.clear()


async def _first_starts(job: BenchJob, found: Measurements, progress: Progress) -> Sizes:
    """Start each variant once, unmeasured, which brings its files into the page cache."""
    able: list[Measured] = []
    errors: list[CorralError] = []
    for spec in job.specs:
        try:
            with progress.step(spec.name, _START):
                able.append(await rehearse(spec, job.directories))
        except (StartFailed, EngineFailed) as error:
            errors.append(error)
            found.give_up(spec.name, _sentence(error))
        except (WorkloadFailed, EngineUnreachable) as error:
            errors.append(StartFailed(f"{spec.name}: {error}", hint="corral plan shows its flags"))
            found.give_up(spec.name, str(error))
    if not able:
        raise errors[0]
    return choose_sizes(able)


@dataclass(frozen=True, slots=True)
class _Run:
    job: BenchJob
    sizes: Sizes
    found: Measurements
    progress: Progress


async def _rounds(run: _Run) -> None:
    longest_s = 0.0
    while run.found.running and run.job.limits.may_begin(
        run.found.complete_rounds, run.progress.elapsed_s, longest_s
    ):
        began_s = time.monotonic()
        run.progress.begin_round()
        run.found.begin_round()
        for spec in order(run.job.specs, run.job.seed, run.found.complete_rounds):
            if spec.name in run.found.running:
                await _measure_one(run, spec)
        run.found.end_round()
        longest_s = max(longest_s, time.monotonic() - began_s)


def order(specs: Sequence[VariantSpec], seed: int, number: int) -> list[VariantSpec]:
    """Return the order of variants in a round; it differs by round and depends on the seed."""
    return Random(f"{seed}:{number}").sample(specs, len(specs))  # noqa: S311 (an order)


async def _measure_one(run: _Run, spec: VariantSpec) -> None:
    try:
        async with AsyncExitStack() as stack:
            with run.progress.step(spec.name, _START):
                starting = private_instance(spec.plan, run.job.directories)
                instance = await stack.enter_async_context(starting)
            run.found.add(spec.name, {READY.name: instance.ready_s})
            await _run_workloads(run, spec, instance)
    except (StartFailed, EngineFailed) as error:
        run.found.give_up(spec.name, _sentence(error))
    except EngineUnreachable as error:  # although its process still runs
        run.found.give_up(spec.name, str(error))


async def _run_workloads(run: _Run, spec: VariantSpec, instance: PrivateInstance) -> None:
    engine = MeasuredEngine(
        instance.client,
        run.sizes,
        run.job.model,
        run.job.directories,
        names_slots=spec.plan.has_own_slots,
    )
    load_before = read_this_processor((instance.pid, os.getpid()))
    before, tokens = run.job.read_energy(), 0
    for workload in run.job.workloads:
        with run.progress.step(spec.name, workload.name):
            if outcome := await _outcome(run, spec, workload, engine):
                run.found.add(spec.name, outcome.values)
                tokens += outcome.tokens
    _add_energy(run, spec, energy.energy_between(before, run.job.read_energy()), tokens)
    load = processor_load(load_before, read_this_processor((instance.pid, os.getpid())))
    run.found.add_load(load.others_cores)
    if peak := instance.peak_memory_bytes():
        run.found.add(spec.name, {PEAK_MEMORY.name: peak})


def _add_energy(run: _Run, spec: VariantSpec, used: Energy, tokens: int) -> None:
    if used.total_j is None or not tokens:
        return
    run.found.add(spec.name, {ENERGY.name: 1000 * used.total_j / tokens})
    run.found.note(f"energy is that of the {used.covers}, for all programs")


async def _outcome(
    run: _Run, spec: VariantSpec, workload: Workload, engine: MeasuredEngine
) -> Outcome | None:
    """Run a workload; note a failure and return None, so that the next workload can run."""
    rng = Random(f"{run.job.seed}:{run.found.complete_rounds}:{workload.name}")  # noqa: S311
    try:
        async with asyncio.timeout(_WORKLOAD_TIMEOUT_S):
            return await workload.run(engine, rng)
    except TimeoutError:
        failure = f"not finished in {_WORKLOAD_TIMEOUT_S:g} s"
    except WorkloadFailed as error:
        failure = str(error)
    run.found.note(f"{spec.name}, {workload.name}: {failure}")
    return None


def _sentence(error: CorralError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
