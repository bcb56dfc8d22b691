"""What would run without adapted values."""

from __future__ import annotations

from supervisor.errors import CorralError
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner


class BasePlans:
    """The plans of models without adapted values, made once per run."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[Plan, Plan | None]] = {}  # with the plan that runs

    def of(self, planner: LaunchPlanner, model: str, runs: Plan) -> Plan | None:
        """Return a model's plan, made when `runs` began; None where it cannot be planned.

        What was measured at the start of a run counts.
        """
        if model not in self._plans or self._plans[model][0] is not runs:
            self._plans[model] = runs, _planned(planner, model)
        return self._plans[model][1]


def _planned(planner: LaunchPlanner, model: str) -> Plan | None:
    try:
        return planner.adapting(model, {}).plan(model)
    except CorralError:  # its next start reports why
        return None
