"""Implements `corral tune`: searches for the best flags of a model, and writes its profile."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.bench import tune as tune_module
from supervisor.bench import tune_space, variants
from supervisor.bench.figures import TOO_FEW, Comparison
from supervisor.bench.own_engine import measure_threads
from supervisor.bench.tune import TuneJob, refused_rows
from supervisor.bench.tune_measure import VariantPlans
from supervisor.bench.tune_search import Outcome, Trial, Trials
from supervisor.bench.tune_space import BASE, GoalName, Variant, render_profile
from supervisor.bench.variants import VariantSpec
from supervisor.cli.bench import machine_facts
from supervisor.cli.targets import choose, name_of
from supervisor.errors import Interrupted
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import CommandResult, ProgressMeter, duration, size, table
from supervisor.plan.tuned_profile import conditions, machine_here, path_of
from supervisor.system import machine
from supervisor.system.paths import Directories, directories

_EXIT_INTERRUPTED: Final = 130
HOW_TO_APPLY: Final = "corral reload applies it to a running daemon"


def _result(
    job: TuneJob,
    outcome: Outcome | None,
    lines: list[str],
    notes: Sequence[str] = (),
    *,
    exit_code: int = 0,
    **written: str | None,
) -> CommandResult:
    """Return the table of all variants and these lines; `written` are members of the data."""
    untried = outcome.untried if outcome else ()
    rows = [*tune_module.rows(_trials(job), job.checks.found, untried), *refused_rows(job)]
    data = {
        "model": job.plans.model,
        "goal": job.goal.name,
        "minutes": job.minutes,
        "seed": job.seed,
        "comparison": outcome.comparison.data() if outcome and outcome.comparison else None,
        "tried": tune_module.data(_trials(job), job.checks.found),
        "refused": {variant.name: reason for variant, reason in job.refused.items()},
        "untried": [variant.name for variant in untried],
        "winner": None,
        "path": None,
        "backup": None,
        **written,
    }
    text = "\n".join([table(tune_module.HEAD, rows), "", *lines])
    return CommandResult(data, text, tuple(notes), exit_code)


def _capacity_notes(job: TuneJob, winner: Variant) -> Iterator[str]:
    plans = [job.plans.plan(side) for side in (BASE, winner)]
    replicas = [job.plans.replicas(side) for side in (BASE, winner)]
    slots = [plan.slots * count for plan, count in zip(plans, replicas, strict=True)]
    if slots[1] < slots[0]:
        yield f"{slots[1]} instead of {slots[0]} requests at once; further ones wait"
    tokens = [plan.ctx_size // plan.slots for plan in plans]
    if tokens[1] < tokens[0]:
        yield f"{tokens[1]} instead of {tokens[0]} tokens of context for each"


def _why_unchanged(job: TuneJob, outcome: Outcome) -> str:
    as_good = "its profile is as good as any variant that was tried"
    best = tune_module.best_so_far(_trials(job))
    if best and best.failure:
        return f"{_describe_trial(job, best)} was rejected: {best.failure}"
    if outcome.comparison and outcome.comparison.verdict != TOO_FEW:
        return f"{as_good} ({outcome.comparison.verdict})"
    return f"there was no time to be certain of {_describe_trial(job, best)}" if best else as_good


def _describe_trial(job: TuneJob, trial: Trial) -> str:
    return f"{trial.variant.name} ({_trials(job).ratio(trial.variant):.2f} ×)"


def _trials(job: TuneJob) -> Trials:
    assert job.search  # noqa: S101 (it has run)
    return job.search.trials


def profile_text(
    job: TuneJob,
    winner: Variant,
    comparison: Comparison,
    shown: Sequence[tuple[str, str]],
    word: str,
) -> str:
    plan, model = job.plans.base, job.plans.model
    profile = job.plans.profile
    at = datetime.now(UTC)
    now = conditions(machine_here(), plan.engine, plan.gguf)
    evidence = replace(
        now, goal=job.goal.name, date=at.strftime("%Y-%m-%d"), result=comparison.verdict
    )
    facts = (
        ("date", at.strftime("%Y-%m-%d %H:%M UTC")),
        ("goal", f"{job.goal.name} ({job.goal.title}): {comparison.verdict}"),
        *shown,
        ("quality", str(job.checks.found.get(winner, "not checked"))),
        ("machine", f"{now.machine}, {size(machine.read().memory_bytes)}, devices: {now.devices}"),
        ("engine", now.engine),
        ("model", f"{plan.gguf.path.name}, {size(plan.gguf.size_bytes)}, {now.model}"),
        ("seed", str(job.seed)),
    )
    words = ["corral", "tune", word, "--goal", job.goal.name, "--minutes", f"{job.minutes:g}"]
    command = shlex.join([*words, "--seed", str(job.seed)])
    return render_profile(model, profile, winner, evidence, command, facts)


def tune(
    word: str,
    config: Path | None,
    goal: GoalName = "latency",
    minutes: float = 5.0,
    seed: int = 0,
    *,
    force: bool = False,
) -> CommandResult:
    where = directories()
    targets = choose([word], config, where)
    (model,) = targets.names
    settings = targets.loaded.settings
    plans = VariantPlans(settings, where, model)
    base = VariantSpec("base", plans.profile, plans.base)
    facts = machine_facts(settings, base.plan)
    if not force:
        variants.check(facts, [base])
    notes = (
        *(f"measured although {obstacle}" for obstacle in variants.obstacles(facts, [base])),
        *variants.notes(facts),
    )
    measure_threads(LaunchPlanner(settings, where), model, where)
    found = _measure(TuneJob(settings, where, model, goal, minutes, seed), where, word)
    return replace(found, notes=(*found.notes, *notes))


def _measure(job: TuneJob, where: Directories, word: str) -> CommandResult:
    model = job.plans.model
    try:
        outcome = asyncio.run(_run(job))
    except KeyboardInterrupt as interrupt:
        if job.search is None:
            raise Interrupted("stopped before anything was measured") from interrupt
        best = tune_module.best_so_far(_trials(job))
        so_far = [f"best so far, not certain: {_describe_trial(job, best)}"] if best else []
        lines = [f"{model}: stopped; nothing was written", *so_far]
        return _result(job, None, lines, exit_code=_EXIT_INTERRUPTED)
    notes = []
    if count := len(outcome.untried):
        whole = len(job.candidates)
        minutes = math.ceil(job.minutes * whole / max(1, whole - count))
        notes = [
            f"{count} of {whole} variants were not tried; --minutes {minutes} has time for all"
        ]
    winner, comparison = outcome.winner, outcome.comparison
    if winner is None or comparison is None:
        path = path_of(model, where.tuned_profiles)
        if path.is_file():
            notes.insert(
                0, f"{path} is from an earlier search: corral tune {model} --undo removes it"
            )
        why = _why_unchanged(job, outcome)
        return _result(job, outcome, [f"{model}: {why}; nothing was written"], notes)
    rounds, prompt = outcome.final_rounds, job.sizes.prompt
    shown = list(tune_module.figure_lines(_trials(job), winner, rounds, prompt))
    text = profile_text(job, winner, comparison, shown, word)
    path, backup = tune_space.write(model, where.tuned_profiles, text)
    lines = [
        f"{model} with {winner.name}: {comparison.verdict}",
        *(f"{name}: {value}" for name, value in shown),
        f"quality: {job.checks.found.get(winner, 'not checked')}",
        f"written to {path}",
    ]
    replaced = [f"the previous profile is in {backup}"] if backup else []
    notes = [*_capacity_notes(job, winner), *replaced, HOW_TO_APPLY, *notes]
    return _result(
        job,
        outcome,
        lines,
        notes,
        winner=winner.name,
        path=str(path),
        backup=str(backup) if backup else None,
    )


def undo(word: str) -> CommandResult:
    profiles = directories().tuned_profiles
    is_path = word.endswith(".gguf") or ("/" in word and not path_of(word, profiles).exists())
    model = name_of(Path(word)) if is_path else word
    path, restored = tune_space.undo(model, profiles)
    data = {"path": str(path), "restored": restored and str(restored)}
    text = f"removed {path}: {model} runs with its profile alone"
    if restored:
        text = f"{path} is restored to its state before the last corral tune"
    return CommandResult(data, text, (HOW_TO_APPLY,))


async def _run(job: TuneJob) -> Outcome:
    whole_s = job.minutes * 60

    def show(stage: str, left_s: float) -> None:
        detail = f"{stage} · at most {duration(left_s)} left"
        meter.show(f"tune {job.plans.model}", 1 - max(0.0, left_s) / whole_s, detail)

    with ProgressMeter() as meter:
        return await job.run(show)
