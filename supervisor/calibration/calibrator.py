"""Measures an instance in its warm-up, and decides whether it has to start again.

The first runs of a model each take another thread count, until all are measured; the next one takes
the fastest. Nothing else may run meanwhile: a disturbed measurement is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor.calibration.measure import measure
from supervisor.calibration.store import MeasurementStore
from supervisor.engine_client.client import EngineClient
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.flags.thread_speeds import ThreadSpeeds
from supervisor.host.processor_load import ProcessorReading, processor_load

# One program that is busy all the time takes about half a core from threads of ours.
_DISTURBING_CORES: Final = 0.3


class ThreadCalibrator:
    """Measures the runs of one replica.

    Args:
        plan: Returns the plan of its present run.
        plan_again: Returns the plan that its next run would have.
        store: Returns where the speeds of a plan are stored.
        is_alone: Whether no other instance computes or loads.
        read: Reads the counters of the processor and of our processes.
    """

    def __init__(
        self,
        *,
        plan: Callable[[], Plan | None],
        plan_again: Callable[[], Plan],
        store: Callable[[Plan], MeasurementStore],
        is_alone: Callable[[], bool],
        read: Callable[[], ProcessorReading],
        emit: Emit,
    ) -> None:
        self._plan = plan
        self._plan_again = plan_again
        self._store = store
        self._is_alone = is_alone
        self._read = read
        self._emit = emit
        self._is_given_up = False

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
            # The next start of the daemon tries again; this one goes on with all cores.
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
