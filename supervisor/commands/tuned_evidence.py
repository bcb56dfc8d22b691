"""The tuned profile that a search found, with the evidence for it."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

from supervisor.bench.comparison import Comparison
from supervisor.commands.tune_result import figures
from supervisor.flags.tuned import Evidence, conditions
from supervisor.fleet.tuned_profiles import machine_here
from supervisor.host import machine
from supervisor.output import size
from supervisor.tune.job import TuneJob
from supervisor.tune.profile_text import TunedText, render
from supervisor.tune.search import Outcome
from supervisor.tune.variant import Variant


def profile_text(
    job: TuneJob, outcome: Outcome, winner: Variant, comparison: Comparison, word: str
) -> str:
    plan, model, options = job.plans.base.plan, job.plans.model, job.options
    profile = job.plans.profile
    at = datetime.now(UTC)
    now = conditions(profile, machine_here(), plan.engine, plan.gguf)
    evidence = Evidence(
        goal=job.goal.name,
        date=at.strftime("%Y-%m-%d"),
        result=comparison.verdict,
        machine=now.machine,
        engine=now.engine,
        devices=now.devices,
        model=now.model,
    )
    facts = (
        ("date", at.strftime("%Y-%m-%d %H:%M UTC")),
        ("goal", f"{job.goal.name} ({job.goal.title}): {comparison.verdict}"),
        *figures(job, outcome, winner),
        ("quality", str(job.checks.found.get(winner, "not checked"))),
        ("machine", f"{now.machine}, {size(machine.read().memory_bytes)}, devices: {now.devices}"),
        ("engine", now.engine),
        ("model", f"{plan.gguf.path.name}, {size(plan.gguf.size_bytes)}, {now.model}"),
        ("seed", str(options.seed)),
    )
    words = ["corral", "tune", word, "--goal", options.goal, "--minutes", f"{options.minutes:g}"]
    command = shlex.join([*words, "--seed", str(options.seed)])
    return render(TunedText(model, profile, winner, evidence, command, facts))
