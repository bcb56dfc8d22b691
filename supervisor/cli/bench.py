"""Implements `corral bench` (measures a model under several profiles) and `corral tune`.

Both measure on separate engines. `corral tune` searches for the best flags of a model, and writes
its profile.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.bench import standard_workloads, tune_search, tune_space, variants
from supervisor.bench import tune as tune_module
from supervisor.bench.figures import (
    ONE_ROUND,
    ROUND_FIGURES,
    TOO_FEW,
    BenchMachine,
    BenchResult,
    Comparison,
    findings,
    values_text,
)
from supervisor.bench.figures import table as bench_table
from supervisor.bench.html_report import shell, verdict_class, write_report
from supervisor.bench.own_engine import measure_threads
from supervisor.bench.runner import Bench, RoundLimits
from supervisor.bench.tune import TuneJob
from supervisor.bench.tune_measure import VariantPlans
from supervisor.bench.tune_search import Outcome, Trial
from supervisor.bench.tune_space import BASE, GoalName, Variant, render_profile
from supervisor.bench.variants import LoadedModel, MachineFacts, VariantSpec
from supervisor.cli.options import names_of
from supervisor.cli.requests import ask_records
from supervisor.cli.targets import choose, name_of
from supervisor.daemon.control_messages import ModelStatus
from supervisor.daemon.model_commands import running_status
from supervisor.errors import AccessDenied, Interrupted, SettingsInvalid, StartFailed
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import (
    CommandResult,
    ProgressMeter,
    colored,
    duration,
    json_lines,
    size,
    table,
)
from supervisor.plan import tuned_profile
from supervisor.plan.fit import capacity
from supervisor.plan.plan import Plan
from supervisor.plan.tuned_profile import conditions, machine_here, path_of
from supervisor.records.requests import RecordedRequest
from supervisor.settings.schema import Settings
from supervisor.system import machine
from supervisor.system.machine import cpu_name
from supervisor.system.paths import Directories, directories
from supervisor.system.processor_load import busy_programs

_WATCHED_S: Final = 0.5


def machine_facts(settings: Settings, plan: Plan) -> MachineFacts:
    """Read the machine, its busy programs (for 0.5 s) and the daemon's loaded models."""
    here, status = machine.read(), running_status()
    return MachineFacts(
        capacity=capacity(here, plan.engine.devices, settings.supervisor.memory_budget),
        available_bytes=here.memory_available_bytes,
        logical_cores=here.logical_cores,
        programs=busy_programs(_WATCHED_S),
        loaded=tuple(
            found for model in (status.models if status else ()) if (found := _loaded_model(model))
        ),
    )


def _loaded_model(model: ModelStatus) -> LoadedModel | None:
    pids = [instance.pid for instance in model.instances if instance.pid is not None]
    if not pids:
        return None
    memory = [size for instance in model.instances if (size := instance.memory_bytes) is not None]
    busy = sum(instance.slots_busy for instance in model.instances)
    return LoadedModel(model.name, sum(memory) if memory else None, busy, tuple(pids))


def data(result: BenchResult) -> dict[str, object]:
    """Return the result for --json, with all raw values and comparisons with the first variant."""
    return asdict(result) | {
        "began_at": result.began_at.isoformat(timespec="seconds"),
        "rounds": result.rounds,
        "variants": [
            asdict(variant) | {"rounds": [values or None for values in variant.rounds]}
            for variant in result.variants
        ],
        "figures": [
            asdict(figure)
            | {"workload": figure.workload, "is_higher_better": figure.is_higher_better}
            for figure in result.figures
        ],
        "comparisons": [
            {"figure": finding.figure.name, "variant": variant.name, **variant.comparison.data()}
            for finding in findings(result)
            for variant in finding.variants
            if variant.comparison
        ],
        "rows": [
            {
                "workload": finding.figure.workload,
                "figure": finding.figure.title,
                "variant": variant.name,
                "values": values_text(variant, finding),
                "verdict": variant.verdict,
                "class": verdict_class(finding, variant),
            }
            for finding in findings(result)
            for variant in finding.variants
        ],
    }


def result_of(
    job: Bench, began_at: datetime, notes: Sequence[str], *, is_interrupted: bool
) -> BenchResult:
    plan, measured, here = job.specs[0].plan, tuple(job.variants.values()), machine.read()
    figures = (*(figure for load in job.workloads for figure in load.figures), *ROUND_FIGURES)
    return BenchResult(
        model=job.model,
        model_file=plan.gguf.path.name,
        engine=plan.engine.version,
        machine=BenchMachine(
            processor=cpu_name(),
            physical_cores=here.physical_cores,
            logical_cores=here.logical_cores,
            memory_bytes=here.memory_bytes,
            devices=tuple(device.description for device in plan.engine.devices),
            system=f"{platform.system()} {platform.release()}",
        ),
        began_at=began_at,
        duration_s=(datetime.now(UTC) - began_at).total_seconds(),
        seed=job.seed,
        workloads=tuple(workload.name for workload in job.workloads),
        rounds_planned=job.limits.planned_rounds,
        is_interrupted=is_interrupted,
        figures=tuple(
            figure for figure in figures if any(variant.values(figure.name) for variant in measured)
        ),
        variants=measured,
        notes=tuple(notes),
    )


_EXIT_INTERRUPTED: Final = 130
_SEED_BITS: Final = 31


def bench(  # noqa: PLR0913, PLR0917 (a command has its options)
    model: str,
    profiles: str,
    workload: str,
    repeats: int | None,
    minutes: float | None,
    seed: int | None,
    force: bool,
    report: Path | None,
    config: Path | None,
    as_lines: bool,
) -> CommandResult:
    """Measure and show the figures, also after Ctrl-C.

    `as_lines`: write progress and `result` or `error` as JSON lines.
    """
    call = partial(_bench, model, profiles, workload, repeats, minutes, seed, report, config)
    call = partial(call, ProgressMeter(as_json=as_lines), force=force)
    return json_lines(call) if as_lines else call()


def _bench(  # noqa: PLR0913, PLR0917 (as bench)
    model: str,
    profiles: str,
    workload: str,
    repeats: int | None,
    minutes: float | None,
    seed: int | None,
    report: Path | None,
    config: Path | None,
    meter: ProgressMeter,
    *,
    force: bool,
) -> CommandResult:
    where = directories()
    targets = choose([model], config, where)
    settings, (name,) = targets.loaded.settings, targets.names
    specs = variants.choose(settings, where, name, names_of(profiles))
    recorded = [RecordedRequest(*row) for row in ask_records("sizes", name, ())]
    workloads = standard_workloads.choose(names_of(workload), name, specs[0].plan, recorded)
    if report and (report.is_dir() or not os.access(report.absolute().parent, os.W_OK)):
        raise AccessDenied(
            f"cannot write the report {report}",
            hint="name a file in a directory that exists and is yours to write",
        )
    facts = machine_facts(settings, specs[0].plan)
    if not force:
        variants.check(facts, specs)
    measure_threads(LaunchPlanner(settings, where), name, where)
    specs = variants.choose(settings, where, name, names_of(profiles))  # with measured threads
    job = Bench(
        model=name,
        specs=specs,
        workloads=workloads,
        limits=RoundLimits(repeats, minutes),
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        directories=where,
        meter=meter,
        recorded=recorded,
    )
    result = _measure_rounds(job, facts)
    notes = [
        f"{variant.name} was given up: {variant.failure}"
        for variant in result.variants
        if variant.failure
    ]
    exit_code = 1 if notes else 0
    notes += result.notes
    if report:
        options = {
            "--seed": result.seed,
            "--profiles": profiles,
            "--workload": workload,
            "--repeats": repeats,
            "--minutes": minutes and f"{minutes:g}",
            "--config": config and config.absolute(),
        }
        error = _write_report(result, report, model, options)
        notes.append(error or f"the report is in {report}")
        exit_code = 1 if error else exit_code
    exit_code = _EXIT_INTERRUPTED if result.is_interrupted else exit_code
    return CommandResult(data(result), _bench_text(result, specs[0].plan), tuple(notes), exit_code)


def _write_report(
    result: BenchResult, report: Path, model: str, options: Mapping[str, object]
) -> str | None:
    """Write the report with the command that repeats it; return an error."""
    words = [word for pair in options.items() if pair[1] not in {None, ""} for word in pair]
    try:
        write_report(result, report, shell(map(str, ["corral", "bench", model, *words])))
    except OSError as error:
        return f"the report {report} was not written: {error.strerror}"
    return None


def _measure_rounds(job: Bench, facts: MachineFacts) -> BenchResult:
    began_at = datetime.now(UTC)
    is_interrupted = False
    try:
        asyncio.run(job.measure())
    except KeyboardInterrupt as interrupt:
        if not job.has_values:
            raise Interrupted("stopped before anything was measured") from interrupt
        is_interrupted = True
    planned = f" of {job.limits.planned_rounds}" if job.limits.planned_rounds else ""
    stopped = f"stopped after {job.complete_rounds}{planned} rounds; the figures are of those"
    notes = (
        *(f"measured although {obstacle}" for obstacle in variants.obstacles(facts, job.specs)),
        *variants.notes(facts),
        *(note for spec in job.specs for note in spec.plan.warnings),
        *job.notes,
        *filter(None, [variants.note_on_load(job.others_cores, facts.logical_cores)]),
        *([stopped] if is_interrupted else []),
    )
    return result_of(job, began_at, notes, is_interrupted=is_interrupted)


def report_head(plan: Plan, *details: str) -> list[str]:
    """Return the first lines of a report of measurements: the model, the machine, `details`."""
    title = f"{plan.model} ({plan.gguf.path.name}) on {plan.engine.version}"
    here = f"{cpu_name()}, {machine.read().physical_cores} cores"
    return [colored(title, "bold"), "; ".join([here, *details]), ""]


def _bench_text(result: BenchResult, plan: Plan) -> str:
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    head = report_head(plan, rounds, f"seed {result.seed}")
    return "\n".join([*head, bench_table(result)])


HOW_TO_APPLY: Final = "corral reload applies it to a running daemon"


def _tune_result(
    job: TuneJob,
    outcome: Outcome | None,
    lines: list[str],
    notes: Sequence[str] = (),
    written: Mapping[str, object] = MappingProxyType({}),
    exit_code: int = 0,
) -> CommandResult:
    """Return the table of all variants and these lines; `written` are members of the data."""
    untried = outcome.untried if outcome else ()
    rows = tune_module.rows(job, untried)
    data = {
        "model": job.plans.model,
        "goal": job.goal.name,
        "minutes": job.minutes,
        "seed": job.seed,
        "comparison": outcome.comparison.data() if outcome and outcome.comparison else None,
        "tried": tune_module.data(job.trials, job.checks.found),
        "refused": {variant.name: reason for variant, reason in job.refused.items()},
        "untried": [variant.name for variant in untried],
        "winner": None,
        "path": None,
        "backup": None,
        **written,
    }
    details = (f"goal {job.goal.name}", f"at most {job.minutes:g} min", f"seed {job.seed}")
    head = report_head(job.plans.base, *details)
    text = "\n".join([*head, table(tune_module.HEAD, rows), "", *lines])
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
    best = tune_module.best_so_far(job.trials)
    if best and best.failure:
        return f"{_describe_trial(job, best)} was rejected: {best.failure}"
    tried = [len(trial.rounds) for trial in job.trials if trial.variant != BASE]
    if max(tried, default=0) < 2:
        return ONE_ROUND
    if outcome.comparison and outcome.comparison.verdict != TOO_FEW:
        return f"{as_good} ({outcome.comparison.verdict})"
    return f"there was no time to be certain of {_describe_trial(job, best)}" if best else as_good


def _describe_trial(job: TuneJob, trial: Trial) -> str:
    return f"{trial.variant.name} ({job.trials.ratio(trial.variant):.2f} ×)"


def profile_text(
    job: TuneJob,
    winner: Variant,
    comparison: Comparison,
    shown: Sequence[tuple[str, str]],
    words: Sequence[str],
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
    goal = ["--goal", job.goal.name, "--minutes", f"{job.minutes:g}", "--seed", str(job.seed)]
    command = shlex.join(["corral", "tune", *words, *goal])
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
    notes = _prepare_tuning(settings, where, model, force=force)
    found = _measure_variants(TuneJob(settings, where, model, goal, minutes, seed), where, word)
    return replace(found, notes=(*found.notes, *notes))


def check_tuned(
    word: str, config: Path | None, minutes: float = 5.0, seed: int = 0, *, force: bool = False
) -> CommandResult:
    """Measure a tuned profile again: one that is worse than the profile below it is removed."""
    where = directories()
    targets = choose([word], config, where)
    (model,) = targets.names
    settings = targets.loaded.settings
    tuned = tuned_profile.read(model, where.tuned_profiles)
    profile = settings.models[model].profile
    if tuned is None:
        raise SettingsInvalid(
            f"there is nothing to check: {model} has no tuned profile",
            hint=f"corral tune {model} makes one",
        )
    if reason := tuned_profile.reason_unused(tuned, profile, machine_here()):
        raise SettingsInvalid(
            f"{tuned.path} is not used: {reason}", hint=f"corral tune {model} measures again"
        )
    notes = _prepare_tuning(settings, where, model, force=force)
    variant = Variant(frozenset({"tuned"}), tuple(tuned.flags.items()), tuned.replicas)
    goal: GoalName = next(
        (name for name in tune_search.GOALS if name == tuned.evidence.goal), "latency"
    )
    job = TuneJob(settings, where, model, goal, minutes, seed, only=variant)
    if reason := job.refused.get(variant):
        raise StartFailed(
            f"{tuned.path} cannot be measured: {reason}",
            hint=f"corral tune {model} --undo removes it",
        )
    found = _measure_tuned(job, variant, where, word)
    return replace(found, notes=(*found.notes, *notes))


def _measure_tuned(job: TuneJob, variant: Variant, where: Directories, word: str) -> CommandResult:
    model, path = job.plans.model, path_of(job.plans.model, where.tuned_profiles)
    try:
        outcome = asyncio.run(_run_search(job))
    except KeyboardInterrupt:
        lines = [f"{model}: stopped; nothing was changed"]
        return _tune_result(job, None, lines, exit_code=_EXIT_INTERRUPTED)
    failure = next((trial.failure for trial in job.trials if trial.variant == variant), None)
    judgement, comparison = tune_module.judge(outcome, failure, job.goal.words), outcome.comparison
    verdict = failure or (comparison.verdict if comparison else TOO_FEW)
    lines, written = [f"{model} with {variant.name}: {verdict}"], {"judgement": judgement}
    if judgement == "worse":
        backup = tune_space.withdraw(model, where.tuned_profiles)
        lines.append(f"{path} is removed: {model} runs with its profile alone")
        notes = [f"corral tune {model} --undo restores it from {backup}", HOW_TO_APPLY]
        return _tune_result(job, outcome, lines, notes, written | {"backup": str(backup)})
    if judgement == "uncertain" or comparison is None:
        lines.append("nothing was changed")
        notes = [f"give it more time: --minutes {math.ceil(job.minutes * 4)}"]
        return _tune_result(job, outcome, lines, notes, written)
    shown = list(
        tune_module.figure_lines(job.trials, variant, outcome.final_rounds, job.sizes.prompt)
    )
    text = profile_text(job, variant, comparison, shown, [word, "--check"])
    tune_space.write(model, where.tuned_profiles, text, backs_up=False)
    lines += [
        *(f"{name}: {value}" for name, value in shown),
        f"quality: {job.checks.found.get(variant, 'not checked')}",
        f"{path} stays, measured on this engine and model",
    ]
    is_useless = judgement == "as good"
    notes = [f"corral tune {model} --undo removes it"] if is_useless else []
    return _tune_result(job, outcome, lines, notes, written | {"path": str(path)})


def _prepare_tuning(
    settings: Settings, where: Directories, model: str, *, force: bool
) -> tuple[str, ...]:
    """Measure thread counts first; return notes, or raise CorralError if the machine is busy."""
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
    return notes


def _measure_variants(job: TuneJob, where: Directories, word: str) -> CommandResult:
    model = job.plans.model
    try:
        outcome = asyncio.run(_run_search(job))
    except KeyboardInterrupt:
        best = tune_module.best_so_far(job.trials)
        so_far = [f"best so far, not certain: {_describe_trial(job, best)}"] if best else []
        lines = [f"{model}: stopped; nothing was written", *so_far]
        return _tune_result(job, None, lines, exit_code=_EXIT_INTERRUPTED)
    notes = []
    if count := len(outcome.untried):
        whole = len(job.candidates)
        minutes = math.ceil(job.minutes * whole / max(1, whole - count))
        notes.append(f"{count} of {whole} variants were not tried; --minutes {minutes} is enough")
    winner, comparison = outcome.winner, outcome.comparison
    if winner is None or comparison is None:
        path = path_of(model, where.tuned_profiles)
        if path.is_file():
            earlier = f"{path} is from an earlier search"
            notes.insert(0, f"{earlier}: corral tune {model} --undo removes it")
        why = _why_unchanged(job, outcome)
        return _tune_result(job, outcome, [f"{model}: {why}; nothing was written"], notes)
    rounds, prompt = outcome.final_rounds, job.sizes.prompt
    shown = list(tune_module.figure_lines(job.trials, winner, rounds, prompt))
    text = profile_text(job, winner, comparison, shown, [word])
    path, backup = tune_space.write(model, where.tuned_profiles, text)
    lines = [
        f"{model} with {winner.name}: {comparison.verdict}",
        *(f"{name}: {value}" for name, value in shown),
        f"quality: {job.checks.found.get(winner, 'not checked')}",
        f"written to {path}",
    ]
    replaced = [f"the previous profile is in {backup}"] if backup else []
    notes = [*_capacity_notes(job, winner), *replaced, HOW_TO_APPLY, *notes]
    written = {"winner": winner.name, "path": str(path), "backup": backup and str(backup)}
    return _tune_result(job, outcome, lines, notes, written)


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


async def _run_search(job: TuneJob) -> Outcome:
    whole_s = job.minutes * 60

    def show(stage: str, left_s: float) -> None:
        detail = f"{stage} · at most {duration(left_s)} left"
        meter.show(f"tune {job.plans.model}", 1 - max(0.0, left_s) / whole_s, detail)

    with ProgressMeter() as meter:
        return await job.run(show)
