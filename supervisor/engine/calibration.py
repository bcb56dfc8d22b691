"""Measures how fast an engine is with several thread counts, when a model is first started.

The first runs of a model each have another thread count, until all are measured during warm-up; the
next run takes the fastest. If something else computes meanwhile, the measurement is not used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import orjson
from attrs import define, field

from proxy.upstream.upstream import Timings
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.events import Emit
from supervisor.plan.auto import ThreadSpeeds
from supervisor.plan.plan import Plan
from supervisor.system import files
from supervisor.system.machine import Machine
from supervisor.system.processor_load import ProcessorReading, processor_load


class MeasurementStore:
    """The measurements of one model with one engine on one machine."""

    def __init__(self, cache_dir: Path, model: Path, engine: Path, machine: Machine) -> None:
        self._directory = cache_dir / "thread_speeds"
        self._files = (model, engine)
        self._machine = f"{machine.physical_cores} {' '.join(sorted(machine.cpu_flags))}"

    def read(self) -> dict[int, ThreadSpeeds]:
        """Return the measured speeds by thread count."""
        try:
            listed = (files.get(self._directory, self._key()) or {})["speeds"].items()
            return {int(count): ThreadSpeeds(**each) for count, each in listed}
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return {}  # not measured, or written by another version

    def add(self, threads: int, speeds: ThreadSpeeds) -> None:
        self._write({**self.read(), threads: speeds})

    def forget(self) -> None:
        self._write({})

    def _write(self, measured: Mapping[int, ThreadSpeeds]) -> None:
        speeds = {str(count): asdict(speeds) for count, speeds in measured.items()}
        files.put(self._directory, self._key(), {"speeds": speeds})

    def _key(self) -> str:
        return files.key_of(self._files, self._machine)


_TIMEOUT_S: Final = 10.0
# Token ids that every vocabulary has. The number of tokens of a text would depend on the model.
_PROMPT: Final = tuple(3 + number % 64 for number in range(384))
# The speed with fewer sequences says little about that with many.
_TOGETHER_MIN: Final = 4
_TOGETHER_MAX: Final = 8


async def measure(client: EngineClient, slots: int) -> ThreadSpeeds | None:
    """Decode a sequence, compute a prompt, then decode as many sequences as slots, 8 at most.

    Returns None if the engine generates no text, does not answer, or takes more than 10 s.
    """
    with suppress(TimeoutError, EngineUnreachable):
        async with asyncio.timeout(_TIMEOUT_S):
            alone = await _complete(client, "Once upon a time", 24)
            long = await _complete(client, _PROMPT, 1)
            if alone and long and alone.decode_ms and long.prompt_ms:
                return ThreadSpeeds(
                    decode=1000 * alone.decoded_tokens / alone.decode_ms,
                    prefill=1000 * long.prompt_tokens / long.prompt_ms,
                    together=await _measure_together(client, min(slots, _TOGETHER_MAX)),
                )
    return None


async def _measure_together(client: EngineClient, sequences: int) -> float | None:
    if sequences < _TOGETHER_MIN:
        return None
    began_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_try_complete(client, f"Story {number}"))
            for number in range(sequences)
        ]
    took_s = time.monotonic() - began_at_s
    found = [timings for task in tasks if (timings := task.result())]
    if len(found) < sequences:
        raise EngineUnreachable(f"{sequences - len(found)} of {sequences} sequences failed")
    return sum(timings.decoded_tokens for timings in found) / took_s


async def _try_complete(client: EngineClient, prompt: str) -> Timings | None:
    """Do as `_complete`, but return None for an error, which the task group would wrap."""
    try:
        return await _complete(client, prompt, 12)
    except EngineUnreachable:
        return None


async def _complete(
    client: EngineClient, prompt: str | Sequence[int], tokens: int
) -> Timings | None:
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "cache_prompt": False}
    response = await client.post("/completion", body)
    content: Mapping[str, Any] = orjson.loads(response.body) if response.status == 200 else {}
    return Timings.read(content.get("timings"))


# A program that is always busy takes about half a core from our threads.
_DISTURBING_CORES: Final = 0.3


@define(eq=False, slots=False, kw_only=True)
class ThreadCalibrator:
    """Measures the runs of one replica.

    `plan` returns the plan of the present run, `plan_again` that of the next; `store` the store for
    a plan's speeds. `is_alone`: no other instance computes or loads. `read` reads the processor's
    and our processes' counters.
    """

    _plan: Callable[[], Plan | None]
    _plan_again: Callable[[], Plan]
    _store: Callable[[Plan], MeasurementStore]
    _is_alone: Callable[[], bool]
    _read: Callable[[], ProcessorReading]
    _emit: Emit
    _is_given_up: bool = field(default=False, init=False)

    async def needs_restart(self, client: EngineClient, run: int) -> bool:
        """Measure this run if its thread count is new; return whether the next run would differ."""
        plan = self._plan()
        if plan is None or plan.untried_threads is None or self._is_given_up:
            return False
        store = self._store(plan)
        if speeds := await self._measure_alone(client, plan.slots):
            store.add(plan.untried_threads, speeds)
            self._emit(
                "instance.speed_measured",
                run=run,
                threads=plan.untried_threads,
                decode_tps=round(speeds.decode, 1),
                prefill_tps=speeds.prefill and round(speeds.prefill, 1),
                together_tps=speeds.together and round(speeds.together, 1),
            )
        else:
            # The next start of the daemon tries again; until then the instance uses all cores.
            self._is_given_up = True
            store.forget()
        return self._plan_again().lines != plan.lines

    async def _measure_alone(self, client: EngineClient, slots: int) -> ThreadSpeeds | None:
        if not self._is_alone():
            return None
        before = self._read()
        speeds = await measure(client, slots)
        others_cores = processor_load(before, self._read()).others_cores or 0.0
        return speeds if self._is_alone() and others_cores < _DISTURBING_CORES else None
