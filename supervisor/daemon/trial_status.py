"""Builds control messages about trials and canaries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from supervisor.daemon import control_messages as messages
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.states import InstanceSnapshot
from supervisor.errors import ErrorFields
from supervisor.experiments.canaries import Canary
from supervisor.experiments.trials import Trial, replicas_by_side
from supervisor.experiments.verdict import SideName, verdict, verdict_over_time
from supervisor.fleet.model import Model, Replica
from supervisor.plan.plan import CanaryTrial, Plan

# Flags that identify an instance; no profile sets them.
_INSTANCE_FLAGS = frozenset({"--slot-save-path", "--host", "--port"})

Memory = Callable[[Replica], int | None]


def trial_note(model: Model) -> messages.TrialNote | None:
    for replica in model.replicas:
        if trial := replica.planner.trial_at(replica.place):
            profile, is_canary = trial.label(model.entry.profile), isinstance(trial, CanaryTrial)
            return messages.TrialNote(profile, is_canary, trial.share, replica.name)
    return None


def trial_status(
    model: Model, trial: Trial, age_s: float, memory: Memory
) -> messages.TrialStatus | None:
    """Return the status of a trial; None if no replica runs it."""
    sides, note = replicas_by_side(model), trial_note(model)
    if note is None:
        return None
    found, notes = (verdict_over_time if note.is_canary else verdict)(trial.figures)
    (replica,) = sides["trial"]
    snapshot = replica.instance.snapshot()

    def side_status(name: SideName, profile: str) -> messages.TrialSideStatus:
        side, replicas = trial.figures.sides[name], sides[name]
        sizes = [size for replica in replicas if (size := memory(replica)) is not None]
        return messages.TrialSideStatus.of(
            side,
            profile=profile,
            instances=[replica.name for replica in replicas],
            conversations=len(side.conversations) - side.excluded,
            memory_bytes=round(fmean(sizes)) if sizes else None,
            **{figure: judged.medians[name] for figure, judged in found.items()},
        )

    return messages.TrialStatus.of(
        note,
        model=model.entry.name,
        state=snapshot.state.value,
        error=instance_error(snapshot),
        age_s=round(age_s, 1),
        base=side_status("base", model.entry.profile),
        trial=side_status("trial", note.profile),
        differences=list(_differences(sides["base"], replica)),
        notes=notes,
        # orjson writes nan and infinity as null.
        **{
            figure: messages.TrialComparison.of(
                judged.comparison, outcome=judged.outcome, requests_to_go=judged.to_go
            )
            for figure, judged in found.items()
        },
    )


def instance_error(facts: InstanceSnapshot) -> ErrorFields | None:
    """Return why an instance does not run; None if it is meant to be stopped."""
    cause = facts.cause if facts.wanted else None
    return error_fields(cause, cause.sentence, facts.log_path) if cause else None


def error_fields(cause: FailureCause | None, message: str, log: Path | None) -> ErrorFields:
    return {
        "code": cause.code if cause else "start_failed",
        "message": message,
        "hint": cause.hint if cause else None,
        "log": str(log) if log else None,
    }


def _differences(base: Iterable[Replica], trial: Replica) -> Iterator[messages.FlagDifference]:
    own = next((replica.plan for replica in base if replica.plan), None)
    if own is None or trial.plan is None:
        return
    before, after = _values(own), _values(trial.plan)
    for flag in dict.fromkeys((*before, *after)):
        if before.get(flag) != after.get(flag):
            yield messages.FlagDifference(flag=flag, base=before.get(flag), trial=after.get(flag))


def _values(plan: Plan) -> Mapping[str, str]:
    return {
        line.flag: line.value or "on" for line in plan.lines if line.flag not in _INSTANCE_FLAGS
    }


def canary_status(
    canary: Canary, left_s: float | None, model: Model | None, trial: messages.TrialStatus | None
) -> messages.CanaryStatus:
    replicas = replicas_by_side(model)["base"] if model else ()
    plans = (replica.plan for replica in replicas)
    return messages.CanaryStatus.of(
        canary,
        engine=str(canary.engine),
        own_engine=next((str(plan.engine.path) for plan in plans if plan), None),
        decides_in_s=left_s,
        trial=trial,
    )
