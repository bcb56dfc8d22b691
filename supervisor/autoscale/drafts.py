"""Turns drafting off where it makes decoding slower, and on again where it pays.

`plan/draft_speed.py` decides, by the speed of the requests with and without drafts. A trial begins
while the model has no requests; what a trial has shown is applied even if it always has some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from supervisor.autoscale.slots import Change, ModelView
from supervisor.builds.help import spec_types
from supervisor.events import Emit, Event, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.stats import OtherRequests
from supervisor.plan import draft_speed
from supervisor.plan.draft_speed import SPEC_TYPE, DraftSpeed, decide
from supervisor.plan.plan import Plan
from supervisor.plan.setting import SettingsByFlag

# The speed of a shorter answer is mostly noise.
_TOKENS_MIN: Final = 4
_BUSY_MAX: Final = 8
_PATIENCE_S: Final = 120.0
# A trial that cannot begin for so long is given up: memory may never hold another instance.
_TRIAL_WAIT_S: Final = 3600.0
# Newer speeds are lost if the daemon is killed.
_SAVE_TOKENS: Final = 1000


@define(eq=False, slots=False)
class DraftDecider(Part):
    """Decides about the models whose `spec-type` is auto; `directory` keeps their speeds.

    `plan_of` returns the plan that an instance of a model runs.
    """

    _plan_of: Callable[[str, str], Plan | None]
    _others: OtherRequests
    _directory: Path
    _emit: Emit
    # The speeds of loaded models, by the key of their plans; a model has one key.
    _speeds: dict[str, DraftSpeed] = field(factory=dict, init=False)
    _keys: dict[str, str] = field(factory=dict, init=False)
    _saved_tokens: dict[str, float] = field(factory=dict, init=False)
    # Whether each model shall draft, and since when that differs from its instances.
    _wanted: dict[str, tuple[bool, float]] = field(factory=dict, init=False)

    @classmethod
    def of_fleet(
        cls, fleet: Fleet, in_flight: Callable[[str], int], directory: Path, emit: Emit
    ) -> DraftDecider:
        others = OtherRequests(in_flight, time.monotonic)
        return cls(partial(running_plan, fleet), others, directory, emit)

    def observe(self, event: Event) -> None:
        if event.name == "request.finished" and event.fields["model"] in self._keys:
            self._count(event.fields)

    def _count(self, fields: Mapping[str, Any]) -> None:
        model, instance = fields["model"], fields["instance"]
        key, plan = self._keys[model], self._plan_of(model, instance)
        if plan is None or plan.draft_key != key:
            return
        others = self._others.count(instance, fields)
        tokens, decode_ms = (fields["decoded_tokens"] or 0) - 1, fields["engine_decode_ms"] or 0
        if fields["status"] == HTTPStatus.OK and tokens >= _TOKENS_MIN and decode_ms > 0:
            self._speeds[key] = draft_speed.count(
                self._speeds[key],
                drafts=_drafts(plan),
                busy=min(_BUSY_MAX, 1 + others),
                tokens=tokens,
                seconds=decode_ms / 1000,
            )

    def sample(self, models: Sequence[ModelView]) -> None:
        """Read the speeds of newly loaded models, and save those that have changed."""
        before, self._keys = self._speeds, {}
        for model in models:
            key = model.plan.draft_key
            if key is None or model.settings.trial is not None:
                continue
            speed = before.get(key) or draft_speed.read(self._directory, key)
            if speed is None and _drafts(model.plan):
                speed = DraftSpeed(str(model.plan.memory_inputs.chosen[SPEC_TYPE]))
            if speed:
                self._keys[model.name], self._speeds[key] = key, speed
        self._speeds = {key: self._speeds[key] for key in self._keys.values()}
        self._saved_tokens = {key: self._saved_tokens.get(key, 0) for key in self._speeds}
        self._wanted = {name: self._wanted[name] for name in self._keys.keys() & self._wanted}
        for key, speed in self._speeds.items():
            if abs(speed.tokens - self._saved_tokens[key]) >= _SAVE_TOKENS:
                self._save(key)

    def _save(self, key: str) -> None:
        self._saved_tokens[key] = self._speeds[key].tokens
        draft_speed.write(self._directory, key, self._speeds[key])

    def changes(self, model: ModelView) -> Sequence[Change]:
        drafts = _drafts(model.plan)
        if (key := self._keys.get(model.name)) is None:
            # A trial of a draft that is no longer set has no meaning for another draft.
            is_left_over = model.plan.draft_key and SPEC_TYPE in model.plan.adapted
            return (Change(SPEC_TYPE, None, "its draft has changed"),) if is_left_over else ()
        before = self._speeds[key]
        speed, wants_drafts = decide(before, drafts=drafts)
        self._speeds[key] = speed
        if speed.tokens < before.tokens:
            self._save(key)
            self._report(model.name, speed)
        if wants_drafts == drafts:
            self._wanted.pop(model.name, None)
            return ()
        is_result = wants_drafts == speed.drafts
        to = speed.setting if is_result else speed.trial()
        reason = to.reason if to else "its trial could not be compared"
        wanted, since_s = self._wanted.get(model.name, (drafts, model.at_s))
        if wanted != wants_drafts:
            since_s = model.at_s
        self._wanted[model.name] = wants_drafts, since_s
        waits_s = model.at_s - since_s
        if not is_result and waits_s >= _TRIAL_WAIT_S:
            self._speeds[key] = draft_speed.postpone(speed)
            return ()
        is_urgent = is_result and waits_s >= _PATIENCE_S
        return (Change(SPEC_TYPE, to, reason, is_urgent=is_urgent),)

    def _report(self, model: str, speed: DraftSpeed) -> None:
        self._emit(
            "drafts.compared",
            model=model,
            spec_type=speed.spec_type,
            drafts=speed.drafts,
            speedup=speed.speedup and round(speed.speedup, 3),
            pause_tokens=speed.pause_tokens,
        )

    def adapted(self, model: str, plan: Plan | None) -> SettingsByFlag:
        """Return the value with its present reason: a trial that was won has another one now."""
        speed = self._speeds.get(self._keys.get(model, ""))
        if plan is None or speed is None or SPEC_TYPE not in plan.adapted:
            return {}
        setting = speed.setting if _drafts(plan) == speed.drafts else None
        return {SPEC_TYPE: setting} if setting else {}


def running_plan(fleet: Fleet, model: str, instance: str) -> Plan | None:
    found = fleet.models.get(model)
    replicas = found.all_replicas if found else ()
    return next((replica.plan for replica in replicas if replica.name == instance), None)


def _drafts(plan: Plan) -> bool:
    return bool(spec_types(plan.memory_inputs.chosen))
