"""Builds control messages about trials and canaries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from supervisor.daemon.control_messages import (
    CanaryStatus,
    FlagDifference,
    TrialComparison,
    TrialNote,
    TrialSideStatus,
    TrialStatus,
)
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import InstanceSnapshot
from supervisor.errors import ErrorFields
from supervisor.experiments.canaries import Canary
from supervisor.experiments.trials import Trial, replicas_by_side
from supervisor.experiments.verdict import FigureVerdict, Side, verdict, verdict_over_time
from supervisor.fleet.model import Model, Replica
from supervisor.plan.plan import CanaryTrial, Plan

# Flags that identify an instance; no profile sets them.
_INSTANCE_FLAGS = frozenset({"--slot-save-path", "--host", "--port"})

Memory = Callable[[Replica], int | None]


def trial_note(model: Model) -> TrialNote | None:
    for replica in model.replicas:
        if trial := replica.planner.places.trial_at(replica.place):
            profile, is_canary = trial.label(model.entry.profile), isinstance(trial, CanaryTrial)
            return TrialNote(profile, is_canary, trial.share, replica.name)
    return None


def trial_status(model: Model, trial: Trial, age_s: float, memory: Memory) -> TrialStatus | None:
    """Return the status of a trial; None if no replica runs it."""
    sides, note = replicas_by_side(model), trial_note(model)
    if note is None:
        return None
    judge = verdict_over_time if note.is_canary else verdict
    (rates, firsts, notes), figures = judge(trial.figures), trial.figures.sides
    base = _side(model.entry.profile, sides["base"], figures["base"], memory)
    base.tokens_per_second, base.first_token_s = rates.base, firsts.base
    tried = _side(note.profile, sides["trial"], figures["trial"], memory)
    tried.tokens_per_second, tried.first_token_s = rates.trial, firsts.trial
    (replica,) = sides["trial"]
    snapshot = replica.instance.snapshot()
    return TrialStatus(
        model=model.entry.name,
        share=note.share,
        state=snapshot.state.value,
        error=instance_error(snapshot),
        age_s=round(age_s, 1),
        base=base,
        trial=tried,
        tokens_per_second=_comparison(rates),
        first_token_s=_comparison(firsts),
        differences=list(_differences(sides["base"], replica)),
        notes=notes,
    )


def _side(
    profile: str, replicas: Iterable[Replica], figures: Side, memory: Memory
) -> TrialSideStatus:
    replicas = list(replicas)
    sizes = [size for replica in replicas if (size := memory(replica)) is not None]
    return TrialSideStatus.of(
        figures,
        profile=profile,
        instances=[replica.name for replica in replicas],
        conversations=len(figures.conversations) - figures.excluded,
        tokens_per_second=None,
        first_token_s=None,
        memory_bytes=round(fmean(sizes)) if sizes else None,
    )


def _comparison(found: FigureVerdict) -> TrialComparison:
    """Return a comparison; orjson writes nan and infinity as null."""
    return TrialComparison.of(found.comparison, outcome=found.outcome, requests_to_go=found.to_go)


def instance_error(facts: InstanceSnapshot) -> ErrorFields | None:
    """Return why an instance does not run; None for one that is meant to be stopped."""
    cause = facts.cause if facts.wanted else None
    return error_fields(cause, cause.sentence, facts.log_path) if cause else None


def error_fields(cause: FailureCause | None, message: str, log: Path | None) -> ErrorFields:
    return {
        "code": cause.code if cause else "start_failed",
        "message": message,
        "hint": cause.hint if cause else None,
        "log": str(log) if log else None,
    }


def _differences(base: Iterable[Replica], trial: Replica) -> Iterator[FlagDifference]:
    own = next((replica.plan for replica in base if replica.plan), None)
    if own is None or trial.plan is None:
        return
    before, after = _values(own), _values(trial.plan)
    for flag in dict.fromkeys((*before, *after)):
        if before.get(flag) != after.get(flag):
            yield FlagDifference(flag=flag, base=before.get(flag), trial=after.get(flag))


def _values(plan: Plan) -> Mapping[str, str]:
    return {
        line.flag: line.value or "on" for line in plan.lines if line.flag not in _INSTANCE_FLAGS
    }


def canary_status(
    canary: Canary, left_s: float | None, model: Model | None, trial: TrialStatus | None
) -> CanaryStatus:
    replicas = replicas_by_side(model)["base"] if model else ()
    plans = (replica.plan for replica in replicas)
    return CanaryStatus.of(
        canary,
        engine=str(canary.engine),
        own_engine=next((str(plan.engine.path) for plan in plans if plan), None),
        decides_in_s=left_s,
        trial=trial,
    )
