"""`corral tune`: search the flags under which a model runs best here, and write them down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from supervisor.bench import preconditions
from supervisor.bench.calibration import measure_threads
from supervisor.bench.variants import VariantSpec
from supervisor.commands.machine_facts import machine_facts
from supervisor.commands.targets import choose, name_of
from supervisor.commands.tune_result import (
    HOW_TO_APPLY,
    Written,
    improved,
    interrupted,
    unchanged,
    untried_notes,
)
from supervisor.commands.tuned_evidence import profile_text
from supervisor.errors import Interrupted
from supervisor.flags.tuned import path_of
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult, ProgressMeter, duration
from supervisor.tune import profile_file
from supervisor.tune.job import TuneJob, TuneOptions
from supervisor.tune.plans import VariantPlans
from supervisor.tune.search import Outcome


def tune(
    word: str, config: Path | None, options: TuneOptions, *, force: bool = False
) -> CommandResult:
    where = directories()
    targets = choose([word], config, where)
    (model,) = targets.names
    settings = targets.loaded.settings
    plans = VariantPlans(settings, where, model)
    base = VariantSpec("base", plans.profile, plans.base.plan)
    facts = machine_facts(settings, base.plan, where)
    if not force:
        preconditions.check(facts, [base])
    notes = (
        *(f"measured although {one}" for one in preconditions.obstacles(facts, [base])),
        *preconditions.notes(facts),
    )
    measure_threads(LaunchPlanner(settings, where), model, where)
    found = _measure(TuneJob(settings, where, model, options), where, word)
    return replace(found, notes=(*found.notes, *notes))


def _measure(job: TuneJob, where: Directories, word: str) -> CommandResult:
    try:
        outcome = asyncio.run(_run(job))
    except KeyboardInterrupt as interrupt:
        if job.search is None:
            raise Interrupted("stopped before anything was measured") from interrupt
        return interrupted(job)
    notes = untried_notes(job, outcome)
    if outcome.winner is None or outcome.comparison is None:
        found = unchanged(job, outcome, where)
        return replace(found, notes=(*found.notes, *notes))
    text = profile_text(job, outcome, outcome.winner, outcome.comparison, word)
    written = Written(*profile_file.write(job.plans.model, where.tuned_profiles, text))
    found = improved(job, outcome, outcome.winner, outcome.comparison, written)
    return replace(found, notes=(*found.notes, *notes))


def undo(word: str) -> CommandResult:
    profiles = directories().tuned_profiles
    is_path = word.endswith(".gguf") or ("/" in word and not path_of(word, profiles).exists())
    model = name_of(Path(word)) if is_path else word
    done = profile_file.undo(model, profiles)
    data = {"path": str(done.path), "restored": done.restored and str(done.restored)}
    if done.restored:
        text = f"{done.path} is again what it was before the last corral tune"
    else:
        text = f"removed {done.path}: {model} runs with its profile alone"
    return CommandResult(data, text, (HOW_TO_APPLY,))


async def _run(job: TuneJob) -> Outcome:
    meter = ProgressMeter()
    whole_s = job.options.minutes * 60

    def show(stage: str, left_s: float) -> None:
        detail = f"{stage} · at most {duration(left_s)} left"
        meter.show(f"tune {job.plans.model}", 1 - max(0.0, left_s) / whole_s, detail)

    try:
        return await job.run(show)
    finally:
        meter.clear()
