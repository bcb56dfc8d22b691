"""One tuning of a model: plans, measures and checks until the result is certain."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.errors import ModelInvalid, StartFailed
from supervisor.flags.draft_heads import offered_types, usable_type
from supervisor.host import machine
from supervisor.host.paths import Directories
from supervisor.settings.schema import Settings
from supervisor.tune.goal import GOALS
from supervisor.tune.measure import Measurements
from supervisor.tune.plans import VariantPlans
from supervisor.tune.quality_checks import QualityChecks
from supervisor.tune.rounds import BaseFailed, Progress
from supervisor.tune.search import Outcome, Search
from supervisor.tune.sizes import Sizes
from supervisor.tune.space import GoalName, Situation, candidates
from supervisor.tune.variant import BASE, Variant

# An engine that is ended in the middle of a request takes this long on a busy machine.
_ENDING_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of the command line."""

    goal: GoalName = "latency"
    minutes: float = 5.0
    seed: int = 0


class TuneJob:
    """What one command measures; its parts can be read after an interrupt."""

    def __init__(
        self,
        settings: Settings,
        directories: Directories,
        model: str,
        options: TuneOptions,
        *,
        first: tuple[Variant, ...] = (),
    ) -> None:
        """Plan the profile and its variants; those of `first` are tried before all others.

        Raises:
            CorralError: The model cannot run, or generates no text.
        """
        self._ends_at_s = time.monotonic() + options.minutes * 60
        self.options = options
        self.goal = GOALS[options.goal]
        self.plans = VariantPlans(settings, directories, model)
        _check_generates(self.plans)
        wanted = (*first, *candidates(options.goal, _situation(self.plans)))
        usable = self.plans.usable(wanted)
        self.refused: Mapping[Variant, str] = {
            one: found.reason for one, found in usable.items() if found
        }
        self._candidates = tuple(one for one, found in usable.items() if found is None)
        self._measurements = Measurements(self.goal, self.plans, directories)
        self.checks = QualityChecks(self.plans, directories, lambda: self.sizes.quality)
        self.search: Search | None = None

    @property
    def candidates(self) -> tuple[Variant, ...]:
        """What it tries, if there is time."""
        return self._candidates

    @property
    def sizes(self) -> Sizes:
        """Of the requests; known once the base was measured."""
        if self._measurements.sizes is None:
            raise StartFailed("nothing was measured yet")
        return self._measurements.sizes

    async def run(self, progress: Progress) -> Outcome:
        """Search; raises StartFailed if nothing could be measured."""
        self.search = Search(
            self.goal,
            self._candidates,
            self._measurements.measure,
            self.checks.check,
            budget_s=self._ends_at_s - _ENDING_S - time.monotonic(),
            clock=time.monotonic,
            seed=self.options.seed,
            progress=progress,
        )
        more = f"--minutes {math.ceil(self.options.minutes * 4)}"
        try:
            outcome = await self.search.run()
        except BaseFailed as error:
            raise StartFailed(
                f"{self.plans.model} could not be measured with its profile: {error}",
                hint=f"give it more time ({more}), or see whether it starts: "
                f"corral start {self.plans.model}",
            ) from error
        if self.search.trials.is_empty:
            raise StartFailed(
                f"no variant of {self.plans.model} could be measured in "
                f"{self.options.minutes:g} minutes",
                hint=f"give it more time ({more}), and end other programs",
            )
        return outcome


def refused_rows(job: TuneJob) -> Iterator[tuple[str, ...]]:
    for variant, reason in job.refused.items():
        yield variant.name, "0", "-", reason


def _check_generates(plans: VariantPlans) -> None:
    use = plans.base.plan.embedding
    if use and use.is_only:
        raise ModelInvalid(
            f"{plans.model} makes embeddings, and tuning measures generated text",
            hint=f"corral plan {plans.model} shows how it runs",
        )
    if reason := plans.reason_against(BASE):
        raise StartFailed(
            f"{plans.model} cannot be measured with its profile: {reason.reason}",
            hint="end other programs, or unload models: corral unload",
        )


def _situation(plans: VariantPlans) -> Situation:
    plan = plans.base.plan
    here = machine.read()
    return Situation(
        chosen=plan.memory_inputs.chosen,
        flags=plan.engine.flags,
        physical_cores=here.physical_cores,
        logical_cores=here.logical_cores,
        slots=plan.slots,
        ctx_slot=plan.ctx_size // plan.slots,
        layers=plan.gguf.layers,
        devices=tuple(one.name for one in plan.engine.devices),
        draft_type=usable_type(
            plan.memory_inputs.draft, plan.gguf, offered_types(plan.engine.flags)
        ),
    )
