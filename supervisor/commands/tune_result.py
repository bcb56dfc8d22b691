"""What `corral tune` shows: what was tried, what won, by how much, and what its answers lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.bench.comparison import TOO_FEW, Comparison
from supervisor.flags.tuned import path_of
from supervisor.host.paths import Directories
from supervisor.output import CommandResult, table
from supervisor.tune import result
from supervisor.tune.job import TuneJob, refused_rows
from supervisor.tune.search import Outcome
from supervisor.tune.trials import Trial, Trials
from supervisor.tune.variant import Variant

_EXIT_INTERRUPTED: Final = 130
HOW_TO_APPLY: Final = "a running daemon takes it over at: corral reload"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and where that which stood there is now."""

    path: Path
    backup: Path | None


def untried_notes(job: TuneJob, outcome: Outcome) -> tuple[str, ...]:
    count, whole = len(outcome.untried), len(job.candidates)
    if not count:
        return ()
    minutes = math.ceil(job.options.minutes * whole / max(1, whole - count))
    return (f"{count} of {whole} variants were not tried; --minutes {minutes} has time for all",)


def improved(
    job: TuneJob, outcome: Outcome, winner: Variant, comparison: Comparison, written: Written
) -> CommandResult:
    text = [
        f"{job.plans.model} with {winner.name}: {comparison.verdict}",
        *(f"{name}: {value}" for name, value in figures(job, outcome, winner)),
        f"quality: {job.checks.found.get(winner, 'not checked')}",
        f"written to {written.path}",
    ]
    notes = [*_capacity_notes(job, winner)]
    notes += [f"what stood there is in {written.backup}"] if written.backup else []
    data = _data(job, outcome) | {
        "winner": winner.name,
        "path": str(written.path),
        "backup": written.backup and str(written.backup),
    }
    return CommandResult(data, _with_table(job, outcome, text), (*notes, HOW_TO_APPLY))


def _capacity_notes(job: TuneJob, winner: Variant) -> Iterator[str]:
    """What the model can do less of than before."""
    before, after = job.plans.base, job.plans.plan(winner)
    slots = [one.plan.slots * one.replicas for one in (before, after)]
    if slots[1] < slots[0]:
        yield f"{slots[1]} instead of {slots[0]} requests at once; further ones wait"
    tokens = [one.plan.ctx_size // one.plan.slots for one in (before, after)]
    if tokens[1] < tokens[0]:
        yield f"{tokens[1]} instead of {tokens[0]} tokens of context for each"


def unchanged(job: TuneJob, outcome: Outcome, where: Directories) -> CommandResult:
    model = job.plans.model
    text = [f"{model}: {_why_unchanged(job, outcome)}; nothing was written"]
    path = path_of(model, where.tuned_profiles)
    notes = (
        (f"{path} is from an earlier search: corral tune {model} --undo takes it back",)
        if path.is_file()
        else ()
    )
    data = _data(job, outcome) | {"winner": None, "path": None, "backup": None}
    return CommandResult(data, _with_table(job, outcome, text), notes)


def _why_unchanged(job: TuneJob, outcome: Outcome) -> str:
    as_good = "its profile is as good as any variant that was tried"
    best = result.best_so_far(_trials(job))
    if best and best.failure:
        return f"{_words(job, best)} was not taken: {best.failure}"
    if outcome.comparison and outcome.comparison.verdict != TOO_FEW:
        return f"{as_good} ({outcome.comparison.verdict})"
    return f"there was no time to be certain of {_words(job, best)}" if best else as_good


def _words(job: TuneJob, trial: Trial) -> str:
    return f"{trial.variant.name} ({_trials(job).ratio(trial.variant):.2f} ×)"


def _trials(job: TuneJob) -> Trials:
    assert job.search  # noqa: S101 (it has run)
    return job.search.trials


def interrupted(job: TuneJob) -> CommandResult:
    best = result.best_so_far(_trials(job))
    so_far = [f"best so far, not certain: {_words(job, best)}"] if best else []
    text = [f"{job.plans.model}: stopped; nothing was written", *so_far]
    data = _data(job, None) | {"winner": None, "path": None, "backup": None}
    return CommandResult(data, _with_table(job, None, text), exit_code=_EXIT_INTERRUPTED)


def _with_table(job: TuneJob, outcome: Outcome | None, text: list[str]) -> str:
    untried = outcome.untried if outcome else ()
    rows = [*result.rows(_trials(job), job.checks.found, untried), *refused_rows(job)]
    return "\n".join([table(result.HEAD, rows), "", *text])


def _data(job: TuneJob, outcome: Outcome | None) -> dict[str, object]:
    return {
        "model": job.plans.model,
        "goal": job.goal.name,
        "minutes": job.options.minutes,
        "seed": job.options.seed,
        "comparison": outcome.comparison.data() if outcome and outcome.comparison else None,
        "tried": result.data(_trials(job), job.checks.found),
        "refused": {one.name: reason for one, reason in job.refused.items()},
        "untried": [one.name for one in outcome.untried] if outcome else [],
    }


def figures(job: TuneJob, outcome: Outcome, winner: Variant) -> list[tuple[str, str]]:
    shown = result.shown(job.goal, job.sizes.prompt)
    return list(result.figure_lines(_trials(job), winner, outcome.final_rounds, shown))
