"""Decides whether a model gets more slots or fewer, by the demand for them.

It gets more once requests have queued nearly all the time for `queued_s`, and fewer, but at least
the planned number, once no more than half of the slots were in use for `quiet_s`. In between
nothing changes. Pure, except the history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from supervisor.fleet.planner import LaunchPlanner
from supervisor.plan.auto import CONTEXT, SLOTS
from supervisor.plan.plan import Plan
from supervisor.plan.setting import Setting
from supervisor.settings.schema import ModelSettings
from supervisor.settings.tables import SlotSettings


@dataclass(frozen=True, slots=True)
class ModelView:
    """The state of a loaded model, all of whose instances serve."""

    name: str
    at_s: float
    waiting: int  # requests that wait for a slot
    busy: int  # slots in use
    instances: Mapping[str, int]  # the process of each, by name
    plan: Plan  # the running plan of its first instance
    base: Plan  # the plan without adapted values
    settings: ModelSettings

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.busy)


@dataclass(frozen=True, slots=True)
class Change:
    """A wanted change of one value of a model."""

    key: str  # the present name of the option, one of AUTO_VALUES
    to: Setting | None  # None for the planned value
    reason: str  # a clause
    # Whether to replace instances while requests run, which complete on the old instance. Other
    # changes wait until there are no requests.
    is_urgent: bool = False


class Decider(Protocol):
    """Decides about one or more values of all models, by a bounded history."""

    def sample(self, models: Sequence[ModelView]) -> None:
        """Note the state of the loaded models and of the machine; called every few seconds."""

    def changes(self, model: ModelView) -> Sequence[Change]:
        """Return the wanted changes, each until it has been made."""


ORIGIN: Final = "demand"
# The share of the samples in `queued_s`; between requests of a client the queue may be empty.
_QUEUED_SHARE: Final = 0.9
# The most that the settings allow, which limit quiet_s by queued_s, with early samples.
_SAMPLES_MAX: Final = 20_000
# The share of sample_s below which a sample is skipped: another model may need samples more often.
_EARLY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Demand:
    at_s: float
    waiting: int
    busy: int
    slots: int  # of all instances together


# A number of slots, and why.
WantedSlots = tuple[int, str]


def decide_slots(
    history: Sequence[Demand], limits: SlotSettings, *, now: int, planned: int
) -> WantedSlots | None:
    """Decide by the history, oldest first; None for no change. Slots are those of an instance."""
    most = max(limits.max, planned)
    if not limits.follow_demand:
        why = "its slots do not follow demand any more"
        return (planned, why) if now != planned else None
    if now > most:
        return most, "slots.max is lower now"
    return _wants_more(history, limits, now) or _wants_fewer(history, limits, now, planned)


def _wants_more(history: Sequence[Demand], limits: SlotSettings, now: int) -> WantedSlots | None:
    recent = _window(history, limits.queued_s)
    queued = [demand for demand in recent if demand.waiting]
    count = min(2 * now, limits.max)
    if not queued or len(queued) < _QUEUED_SHARE * len(recent) or count <= now:
        return None
    return count, f"requests queued for {limits.queued_s:g} s with {recent[-1].slots} slots"


def _wants_fewer(
    history: Sequence[Demand], limits: SlotSettings, now: int, planned: int
) -> WantedSlots | None:
    recent = _window(history, limits.quiet_s)
    if now <= planned or not recent or any(demand.waiting for demand in recent):
        return None
    used = max(demand.busy / demand.slots for demand in recent) * now
    count = now
    while count > planned and used <= count / 2:
        count = max(planned, count // 2)
    if count == now:
        return None
    busy = max(demand.busy for demand in recent)
    in_use = f"at most {busy} of {recent[-1].slots} slots in use"
    return count, f"{in_use} for {limits.quiet_s:g} s"


def _window(history: Sequence[Demand], length_s: float) -> Sequence[Demand]:
    """Return the samples of the last seconds; none if the history is shorter."""
    begin_s = history[-1].at_s - length_s if history else 0.0
    if not history or history[0].at_s > begin_s:
        return ()
    return [demand for demand in history if demand.at_s >= begin_s]


def may_change_slots(planned: Plan, settings: ModelSettings) -> bool:
    """Return whether slots may follow demand: they are not set, and each has its own cache.

    A model with a trial keeps its slots, as a trial compares equals. So does a model with RPC
    workers, which cannot serve a successor beside it.
    """
    is_ours = {SLOTS, CONTEXT} <= planned.derived and planned.has_own_slots
    return is_ours and settings.trial is None and not planned.workers


def most_slots(planner: LaunchPlanner, model: str) -> int | None:
    """Return the slots that memory allows; None if fixed. Raises as `LaunchPlanner.plan`."""
    settings, planned = planner.model_settings(model), planner.adapting(model, {}).plan(model)
    is_on = planner.supervisor.adaptive and settings.slots.follow_demand
    if not is_on or not may_change_slots(planned, settings):
        return None
    most = Setting(max(planned.slots, settings.slots.max), ORIGIN)
    return planner.adapting(model, {SLOTS: most}).plan(model).slots


class SlotDecider:
    def __init__(self) -> None:
        self._histories: dict[str, deque[Demand]] = {}

    def sample(self, models: Sequence[ModelView]) -> None:
        mine = [model for model in models if may_change_slots(model.base, model.settings)]
        names = {model.name for model in mine}
        histories = self._histories.items()
        self._histories = {name: history for name, history in histories if name in names}
        for model in mine:
            history = self._histories.setdefault(model.name, deque(maxlen=_SAMPLES_MAX))
            slots, limits = model.plan.slots * len(model.instances), model.settings.slots
            if history and history[-1].slots != slots:
                history.clear()
            if history and model.at_s - history[-1].at_s < limits.sample_s * _EARLY:
                continue
            history.append(Demand(model.at_s, model.waiting, model.busy, slots))
            # One sample before the longer window is kept.
            begin_s = model.at_s - max(limits.queued_s, limits.quiet_s)
            while len(history) > 1 and history[1].at_s <= begin_s:
                history.popleft()

    def changes(self, model: ModelView) -> Sequence[Change]:
        limits, planned = model.settings.slots, model.base.slots
        if model.name not in self._histories:
            return ()
        history, now = self._histories[model.name], model.plan.slots
        wanted = decide_slots(history, limits, now=now, planned=planned)
        if wanted is None:
            return ()
        count, reason = wanted
        to = Setting(count, ORIGIN, reason) if count > planned else None
        return (Change(SLOTS, to, reason, is_urgent=count > now),)
