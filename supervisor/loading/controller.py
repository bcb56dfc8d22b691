"""Loads models that are requested, and unloads others when memory is needed.

`decide.py` decides again after each event that may change the decision: a request, a command, an
instance's new state, a model that became idle, or time. This carries it out. No request is cut: a
busy model is paused first, and its instances stop once they have no requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING, Final

from attrs import define, field

from proxy.observe.record import LoadCause
from supervisor.events import Emit, Event, Part
from supervisor.fleet.fleet import START_OVER, Fleet
from supervisor.fleet.model import Model, Phase, phase_of, snapshots_of
from supervisor.loading.decide import (
    OTHER_PROGRAMS,
    Actions,
    Eviction,
    ModelState,
    OtherPrograms,
    Waiting,
    decide,
    eviction,
    give_way,
    queue,
    rule_against,
)
from supervisor.loading.memory_usage import HOST, Bytes, MemoryUsage
from supervisor.settings.groups import Groups

if TYPE_CHECKING:
    from proxy.router.router import Router

# A smaller progress says too little about the rest of a load.
_PROGRESS_MIN: Final = 0.1
_LEFT_MIN_S: Final = 0.05


class LoadTimes:
    def __init__(self) -> None:
        self._began_at_s: dict[str, float] = {}
        self._latest_s: dict[str, deque[float]] = {}

    def begin(self, name: str, now_s: float) -> None:
        self._began_at_s.setdefault(name, now_s)

    def observe(self, name: str, phase: Phase, now_s: float) -> None:
        """Note the phase of a model; a load may have ended."""
        if phase == "loading" or name not in self._began_at_s:
            return
        duration_s = now_s - self._began_at_s.pop(name)
        if phase == "loaded":
            self._latest_s.setdefault(name, deque(maxlen=5)).append(duration_s)

    def usual_s(self, name: str) -> float | None:
        """Return the median of the latest loads; None for a model that was never loaded."""
        latest_s = self._latest_s.get(name)
        # The shorter of two, because the first load reads the file from disk.
        return median_low(latest_s) if latest_s else None

    def left_s(self, name: str, progress: float, now_s: float) -> float | None:
        """Return the rest of a load that has this progress or has not begun; None if unknown."""
        usual_s, began_at_s = self.usual_s(name), self._began_at_s.get(name)
        if began_at_s is None:
            return usual_s
        elapsed_s = now_s - began_at_s
        if usual_s is not None and elapsed_s < usual_s:
            return usual_s - elapsed_s
        if progress >= _PROGRESS_MIN:
            return max(_LEFT_MIN_S, elapsed_s * (1 - progress) / progress)
        return None if usual_s is None else _LEFT_MIN_S


# How long another machine waits for the decision, including the unloading of unused models.
_ANSWER_S: Final = 10.0
# About the speed of a disk; estimates the load time of a model that was never loaded.
_BYTES_PER_SECOND: Final = 1e9


@define(eq=False, slots=False)
class AdmissionController(Part):
    """Keeps the requested models loaded, if memory allows."""

    task = "admission"
    serves_until = "stop"

    _fleet: Fleet
    _router: Router
    _emit: Emit
    _memory_usage: MemoryUsage
    _clock: Callable[[], float] = time.monotonic
    _keep_alive_s: dict[str, float] = field(factory=dict, init=False)
    _requested_at_s: dict[str, list[float]] = field(factory=dict, init=False)
    _commanded_at_s: dict[str, float] = field(factory=dict, init=False)
    _for_others: dict[str, asyncio.Future[str | None]] = field(factory=dict, init=False)
    _paused: frozenset[str] = field(factory=frozenset, init=False)
    # When models were unloaded for other programs, the first first; without those that have been
    # loaded or stopped since then.
    gave_way: dict[str, float] = field(factory=dict, init=False)
    _load_times: LoadTimes = field(factory=LoadTimes, init=False)
    _woken: asyncio.Event = field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._router.signals.idle.connect(self.wake)
        self._router.signals.keep_alive.connect(self.keep_alive)

    def observe(self, event: Event) -> None:
        if event.name == "instance.state_changed":
            self.wake()

    def wake(self) -> None:
        self._woken.set()

    async def serve(self) -> None:
        while True:
            self._woken.clear()
            waiting = [self._fleet.models[wanted.name] for wanted in queue(self._demands())]
            await self._memory_usage.refresh_devices(waiting)
            pause_s = self._reconcile()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()

    # Requests and commands.

    @contextmanager
    def request_load(self, model: Model) -> Iterator[None]:
        if model.is_open:
            model.refusal = None
        requests = self._requested_at_s.setdefault(model.entry.name, [])
        requested_at_s = self._clock()
        requests.append(requested_at_s)
        self.wake()
        try:
            yield
        finally:
            requests.remove(requested_at_s)
            self.wake()

    async def load_for_others(self, model: str) -> str | None:
        """Load a model for another machine unless one in use must go; return why not, or None."""
        answer = self._for_others.setdefault(model, asyncio.get_running_loop().create_future())
        self.wake()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            return "other models wait for memory"
        finally:
            if self._for_others.get(model) is answer:
                del self._for_others[model]

    def keep_alive(self, model: str, seconds: float) -> None:
        """Note the keep_alive of a request; it applies until the next one or the unloading."""
        self._keep_alive_s[model] = seconds
        self.wake()

    def command(self, verb: str, names: Sequence[str] = ()) -> Callable[[], bool]:
        """Begin a command; return a function that tells whether it is over.

        `start` and `load` load models, making room if need be; `unload` unloads them until they are
        requested, `stop` until they are started; `restart`. By default all models are meant, for
        `start` and `load` those with `preload` that groups allow together. Raises NoSuchModel: a
        name is not configured, and nothing was begun; SettingsInvalid: there is no such verb.
        """
        if verb in {"start", "load"}:
            return self._load_by_command(names)
        for model in self._fleet.select(names):
            self._commanded_at_s.pop(model.entry.name, None)
            self.gave_way.pop(model.entry.name, None)
            model.is_open = verb == "restart" or (verb == "unload" and model.is_open)
            model.refusal = None
            if verb == "restart":
                self._fleet.planner.reductions.forget(model.entry.name)
            if verb == "stop" and self._requested_at_s.get(model.entry.name):
                self._emit("model.load_refused", model=model.entry.name, reason="it was stopped")
        self.wake()
        return self._fleet.command("stop" if verb == "unload" else verb, names)

    def _load_by_command(self, names: Sequence[str]) -> Callable[[], bool]:
        models = self._fleet.select(names)
        if not names:
            preloaded = [model.entry.name for model in models if model.residency.preload]
            allowed = self._groups.allowed(preloaded)
            models = [model for model in models if model.entry.name in allowed]
        for model in models:
            model.is_open, model.refusal = True, None
            if phase_of(model, snapshots_of(model)) in {"loaded", "loading"}:
                self._load(model)
            else:
                self._fleet.planner.reductions.forget(model.entry.name)
                self._commanded_at_s.setdefault(model.entry.name, self._clock())
        self.wake()
        return lambda: all(self._is_settled(model) for model in models)

    def _is_settled(self, model: Model) -> bool:
        is_waiting = model.entry.name in self._commanded_at_s
        return not is_waiting and {snapshot.state for snapshot in snapshots_of(model)} <= START_OVER

    def loaded_states(self) -> dict[str, ModelState]:
        return {state.name: state for state in self._demands() if state.phase == "loaded"}

    def waiting(self) -> dict[str, Waiting]:
        demands = self._demands()
        return {
            wanted.name: Waiting(
                place,
                rule_against(wanted.name, demands, self._groups),
                wanted.waiting,
                wanted.oldest_wait_s,
                tuple(sorted(self._paused)) if place == 1 else (),
            )
            for place, wanted in enumerate(queue(demands), 1)
        }

    def load_cause(self, model: str, known: LoadCause) -> LoadCause:
        """Return why a model that a request waits for is not loaded, with what is `known`."""
        waits, since_s = self.waiting().get(model), self.gave_way.get(model)
        if waits and waits.rule:
            known = replace(known, load_group=waits.rule.group)
        if since_s is not None:
            known = replace(known, gave_way_ms=round(1000 * (self._clock() - since_s), 1))
        return known

    # Forecasts.

    def forecast(self, model: Model) -> Eviction:
        """Return the models that would be unloaded if a request for this one came now."""
        if phase_of(model, snapshots_of(model)) == "loading":
            return Eviction()
        name, states = model.entry.name, self._model_states()
        patience_s = self._fleet.planner.supervisor.eviction_wait_s
        found = eviction(name, states, self._decide, patience_s)
        return replace(found, rule=rule_against(name, states, self._groups))

    def load_s(self, model: Model) -> float | None:
        """Return the seconds until a model is loaded; None if it never was."""
        progress = min(snapshot.load_progress or 0.0 for snapshot in snapshots_of(model))
        return self._load_times.left_s(model.entry.name, progress, self._clock())

    # Decisions and actions. Nothing from here on waits.

    def _reconcile(self) -> float | None:
        """Decide and act; return the seconds until the next look, or None to wait for an event."""
        for model in self._fleet.models.values():
            phase = phase_of(model, snapshots_of(model))
            self._load_times.observe(model.entry.name, phase, self._clock())
            if phase in {"down", "failed"}:
                self._keep_alive_s.pop(model.entry.name, None)
            if phase in {"loading", "loaded"}:
                self.gave_way.pop(model.entry.name, None)
        states = self._model_states()
        actions = self._decide(states)
        memory, yields = self._memory_usage, self._fleet.planner.settings.devices.yields
        others = OtherPrograms(memory.needed_by_others, may_pause=yields == "always")
        if others.devices and yields != "never":
            actions = give_way(actions, states, memory.free(), memory.returning, others)
        if actions.give_way:
            self.gave_way |= dict.fromkeys(actions.give_way, self._clock())
            models = " ".join(actions.give_way)
            self._emit("devices.yielded", models=models, reason=OTHER_PROGRAMS)
        self._perform(actions)
        return actions.look_again_s

    def _decide(self, states: Sequence[ModelState]) -> Actions:
        return decide(
            states,
            self._memory_usage.capacity(),
            self._memory_usage.free(),
            self._fleet.planner.supervisor,
            self._memory_usage.returning,
            self._groups,
        )

    @property
    def _groups(self) -> Groups:
        return self._fleet.planner.settings.group_rules

    def _model_states(self) -> list[ModelState]:
        models = self._configured_models()
        required = self._memory_usage.required_bytes(models)
        return [self._model_state(model, required[model.entry.name]) for model in models]

    def _demands(self) -> list[ModelState]:
        """Return the states without `required`, which takes a hundred times as long."""
        return [self._model_state(model, {}) for model in self._configured_models()]

    def _configured_models(self) -> list[Model]:
        return [model for model in self._fleet.models.values() if model.is_configured]

    def _model_state(self, model: Model, required: Bytes) -> ModelState:
        name, now_s = model.entry.name, self._clock()
        snapshots = snapshots_of(model)
        phase, demand = phase_of(model, snapshots), self._router.demand(name)
        requested_at_s = self._requested_at_s.get(name, [])
        resident_s = max(snapshot.up_s for snapshot in snapshots)
        load_s = self._load_times.usual_s(name)
        return ModelState(
            name=name,
            phase=phase,
            residency=model.residency,
            required=required,
            is_commanded=name in self._commanded_at_s,
            is_for_others=name in self._for_others,
            is_paused=name in self._paused,
            waiting=demand.waiting if phase == "loaded" else len(requested_at_s),
            oldest_wait_s=now_s
            - min([now_s, *requested_at_s, self._commanded_at_s.get(name, now_s)]),
            working=demand.working,
            idle_s=0.0 if demand.working else min(resident_s, now_s - demand.idle_since_s),
            resident_s=resident_s,
            progress=min(snapshot.load_progress or 0.0 for snapshot in snapshots),
            reload_cost_s=required.get(HOST, 0) / _BYTES_PER_SECOND if load_s is None else load_s,
            cached_tokens=demand.cached_tokens,
            keep_alive_s=self._keep_alive_s.get(name),
        )

    def _perform(self, actions: Actions) -> None:
        for name in self._paused.difference(actions.pause):
            self._router.resume(name)
        for name in actions.pause:
            self._router.pause(name)
        self._paused = frozenset(actions.pause)
        for name, reason in actions.unload.items():
            model = self._fleet.models[name]
            self._emit("model.unloaded", model=model.entry.name, reason=reason)
            for replica in (*model.replicas, *model.replacements):
                replica.instance.stop()
        for name in actions.load:
            self._load(self._fleet.models[name])
        for name, reason in actions.refuse.items():
            is_wanted_here = name in self._commanded_at_s or self._requested_at_s.get(name)
            if not is_wanted_here:
                self._answer(name, reason)
                continue
            self._commanded_at_s.pop(name, None)
            self._fleet.models[name].refusal = reason
            self._emit("model.load_refused", model=name, reason=reason)

    def _answer(self, name: str, reason: str | None) -> None:
        """Tell another machine that waits for it whether a model is loaded."""
        answer = self._for_others.pop(name, None)
        if answer and not answer.done():
            answer.set_result(reason)

    def _load(self, model: Model) -> None:
        self._commanded_at_s.pop(model.entry.name, None)
        self._answer(model.entry.name, None)
        model.refusal = None
        self._load_times.begin(model.entry.name, self._clock())
        for replica in model.replicas:
            replica.instance.start()
