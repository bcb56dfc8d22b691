"""Measures an instance in its warm-up, and decides whether it has to start again.

The first runs of a model each take another thread count, until all are measured; the next one takes
the fastest. Nothing else may run meanwhile: a disturbed measurement is not used.
"""

from __future__ import annotations

from collections.abc import Callable

from supervisor.calibration.measure import measure
from supervisor.calibration.store import MeasurementStore
from supervisor.engine_client.client import EngineClient
from supervisor.events import Emit
from supervisor.flags.plan import Plan


class ThreadCalibrator:
    """Measures the runs of one replica.

    Args:
        plan: Returns the plan of its present run.
        plan_again: Returns the plan that its next run would have.
        store: Returns where the speeds of a plan are stored.
        is_undisturbed: Whether no other instance computes or loads.
    """

    def __init__(
        self,
        *,
        plan: Callable[[], Plan | None],
        plan_again: Callable[[], Plan],
        store: Callable[[Plan], MeasurementStore],
        is_undisturbed: Callable[[], bool],
        emit: Emit,
    ) -> None:
        self._plan = plan
        self._plan_again = plan_again
        self._store = store
        self._is_undisturbed = is_undisturbed
        self._emit = emit

    async def needs_restart(self, client: EngineClient, run: int) -> bool:
        """Measure this run if its thread count is new; return whether the next run would differ."""
        plan = self._plan()
        if plan is None or plan.untried_threads is None:
            return False
        store = self._store(plan)
        speeds = await measure(client, plan.slots) if self._is_undisturbed() else None
        if speeds and self._is_undisturbed():
            store.add(plan.untried_threads, speeds)
            self._emit(
                "instance.speed_measured",
                run=run,
                threads=plan.untried_threads,
                decode_tps=round(speeds.decode, 1),
                prefill_tps=speeds.prefill and round(speeds.prefill, 1),
                together_tps=speeds.together and round(speeds.together, 1),
            )
        elif store.read().speeds:
            store.complete()  # the counts measured so far decide
        else:
            return False  # the next start tries again
        return self._plan_again().lines != plan.lines
