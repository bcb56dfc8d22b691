"""`corral tune`: search the flags under which a model runs best here, and write them down."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from supervisor.bench import preconditions
from supervisor.bench.comparison import Comparison
from supervisor.bench.variants import VariantSpec
from supervisor.commands.machine_facts import machine_facts
from supervisor.commands.targets import choose, name_of
from supervisor.errors import Interrupted
from supervisor.flags.tuned import Evidence, conditions
from supervisor.fleet.tuned_profiles import machine_here
from supervisor.host import machine
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult, ProgressMeter, duration, size, table
from supervisor.tune import profile_file, result
from supervisor.tune.job import TuneJob, TuneOptions, refused_rows
from supervisor.tune.profile_text import TunedText, render
from supervisor.tune.search import Outcome
from supervisor.tune.variant import Variant

_EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class _Written:
    """What was written, and where that which stood there is now."""

    path: Path
    backup: Path | None


def tune(
    word: str, config: Path | None, options: TuneOptions, *, force: bool = False
) -> CommandResult:
    where = directories()
    targets = choose([word], config, where)
    (model,) = targets.names
    settings = targets.loaded.settings
    job = TuneJob(settings, where, model, options)
    base = VariantSpec("base", job.plans.profile, job.plans.base.plan)
    facts = machine_facts(settings, base.plan, where)
    if not force:
        preconditions.check(facts, [base])
    notes = (
        *(f"measured although {one}" for one in preconditions.obstacles(facts, [base])),
        *preconditions.notes(facts),
    )
    found = _measure(job, where, word)
    return replace(found, notes=(*found.notes, *notes))


def _measure(job: TuneJob, where: Directories, word: str) -> CommandResult:
    try:
        outcome = asyncio.run(_run(job))
    except KeyboardInterrupt as interrupt:
        if job.search is None:
            raise Interrupted("stopped before anything was measured") from interrupt
        return _interrupted(job)
    if outcome.winner is None or outcome.comparison is None:
        return _unchanged(job, outcome, where)
    text = _text_of(job, outcome, outcome.winner, outcome.comparison, word)
    written = _Written(*profile_file.write(job.plans.model, where.tuned_profiles, text))
    return _improved(job, outcome, outcome.winner, outcome.comparison, written)


def undo(word: str) -> CommandResult:
    model = name_of(Path(word)) if "/" in word or word.endswith(".gguf") else word
    done = profile_file.undo(model, directories().tuned_profiles)
    data = {"path": str(done.path), "restored": done.restored and str(done.restored)}
    if done.restored:
        text = f"{done.path} is again what it was before the last corral tune"
    else:
        text = f"removed {done.path}: {model} runs with its profile alone"
    return CommandResult(data, text, (_HOW_TO_APPLY,))


_HOW_TO_APPLY: Final = "a running daemon takes it over at: corral reload"


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


def _improved(
    job: TuneJob, outcome: Outcome, winner: Variant, comparison: Comparison, written: _Written
) -> CommandResult:
    text = [
        f"{job.plans.model} with {winner.name}: {comparison.verdict}",
        *(f"{name}: {value}" for name, value in _figures(job, outcome, winner)),
        f"quality: {job.checks.found.get(winner, 'not checked')}",
        f"written to {written.path}",
    ]
    notes = [f"what stood there is in {written.backup}"] if written.backup else []
    data = _data(job, outcome) | {
        "winner": winner.name,
        "path": str(written.path),
        "backup": written.backup and str(written.backup),
    }
    return CommandResult(data, _with_table(job, outcome, text), (*notes, _HOW_TO_APPLY))


def _unchanged(job: TuneJob, outcome: Outcome, where: Directories) -> CommandResult:
    model = job.plans.model
    reason = f" ({outcome.comparison.verdict})" if outcome.comparison else ""
    as_good = f"its profile is as good as any variant that was tried{reason}"
    text = [f"{model}: {as_good}; nothing was written"]
    path = where.tuned_profiles / f"{model}.toml"
    notes = (
        (f"{path} is from an earlier search: corral tune {model} --undo takes it back",)
        if path.is_file()
        else ()
    )
    data = _data(job, outcome) | {"winner": None, "path": None, "backup": None}
    return CommandResult(data, _with_table(job, outcome, text), notes)


def _interrupted(job: TuneJob) -> CommandResult:
    assert job.search  # noqa: S101 (the caller has checked)
    trials = job.search.trials
    best = result.best_so_far(trials)
    so_far = f"best so far, not certain: {best.name}, {trials.ratio(best):.2f} ×" if best else ""
    text = [f"{job.plans.model}: stopped; nothing was written", *([so_far] if so_far else [])]
    data = _data(job, None) | {"winner": None, "path": None, "backup": None}
    return CommandResult(data, _with_table(job, None, text), exit_code=_EXIT_INTERRUPTED)


def _with_table(job: TuneJob, outcome: Outcome | None, text: list[str]) -> str:
    assert job.search  # noqa: S101 (it has run)
    untried = outcome.untried if outcome else ()
    rows = [*result.rows(job.search.trials, job.checks.found, untried), *refused_rows(job)]
    return "\n".join([table(result.HEAD, rows), "", *text])


def _data(job: TuneJob, outcome: Outcome | None) -> dict[str, object]:
    assert job.search  # noqa: S101 (it has run)
    return {
        "model": job.plans.model,
        "goal": job.goal.name,
        "minutes": job.options.minutes,
        "seed": job.options.seed,
        "comparison": outcome.comparison.data() if outcome and outcome.comparison else None,
        "tried": result.data(job.search.trials, job.checks.found),
        "refused": {one.name: reason for one, reason in job.refused.items()},
        "untried": [one.name for one in outcome.untried] if outcome else [],
    }


def _figures(job: TuneJob, outcome: Outcome, winner: Variant) -> list[tuple[str, str]]:
    assert job.search  # noqa: S101 (it has run)
    shown = result.shown(job.goal, job.sizes.prompt)
    return list(result.figure_lines(job.search.trials, winner, outcome.final_rounds, shown))


def _text_of(
    job: TuneJob, outcome: Outcome, winner: Variant, comparison: Comparison, word: str
) -> str:
    plan, model, options = job.plans.base.plan, job.plans.model, job.options
    profile = job.plans.profile
    now = conditions(profile, machine_here(), plan.engine, plan.gguf)
    evidence = Evidence(
        goal=job.goal.name,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        result=comparison.verdict,
        machine=now.machine,
        engine=now.engine,
        devices=now.devices,
        model=now.model,
    )
    facts = (
        ("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("goal", f"{job.goal.name} ({job.goal.title}): {comparison.verdict}"),
        *_figures(job, outcome, winner),
        ("quality", str(job.checks.found.get(winner, "not checked"))),
        ("machine", f"{now.machine}, {size(machine.read().memory_bytes)}, devices: {now.devices}"),
        ("engine", now.engine),
        ("model", f"{plan.gguf.path.name}, {size(plan.gguf.size_bytes)}, {now.model}"),
        ("seed", str(options.seed)),
    )
    words = ["corral", "tune", word, "--goal", options.goal, "--minutes", f"{options.minutes:g}"]
    command = shlex.join([*words, "--seed", str(options.seed)])
    return render(TunedText(model, profile, winner, evidence, command, facts))
