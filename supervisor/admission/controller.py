"""Brings models up when they are called, and sends them away when others need the room.

What is to be done, decide.py decides; this performs it, again after everything that may change
the decision: a call, a command, an instance that changed, a model that fell idle, or the time.
Nothing that works is cut: a model that must leave for another is first given nothing new, and its
instances are stopped when none of them holds a request any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from supervisor.admission.decide import Actions, decide, queue
from supervisor.admission.memory_usage import HOST, MemoryUsage
from supervisor.admission.model_state import ModelState, Waiting
from supervisor.events import Emit
from supervisor.fleet.availability import Phase, facts_of, phase_of
from supervisor.fleet.fleet import START_OVER, Fleet
from supervisor.fleet.model import Model

# About what a disk reads: how long a model loads that never did.
_BYTES_PER_SECOND: Final = 1e9


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients have of a model that is up, or want of it.

    Attributes:
        waiting: Requests in its line.
        working: Requests that its instances hold.
        ended_at_s: Monotonic time at which the last request ended; minus infinity before the first.
        cached_tokens: Tokens of conversations that its instances are believed to hold.
    """

    waiting: int = 0
    working: int = 0
    ended_at_s: float = float("-inf")
    cached_tokens: int = 0


class DemandSource(Protocol):
    """Those whom models are brought up for."""

    def demand(self, model: str, /) -> Demand:
        """Return what they have and want of a model."""

    def pause(self, model: str, /) -> None:
        """Have a model's requests wait in line, even where a slot is free."""

    def resume(self, model: str, /) -> None:
        """Let them go on."""


class AdmissionController:
    """Keeps models coming and going.

    Args:
        fleet: Every model.
        clients: Those who call.
        emit: Where events go.
        memory_usage: What memory models take and may take.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        clients: DemandSource,
        emit: Emit,
        memory_usage: MemoryUsage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._clients = clients
        self._emit = emit
        self._memory_usage = memory_usage
        self._clock = clock
        self._calls: dict[str, dict[int, float]] = {}
        self._numbers = count()
        self._wishes: dict[str, float] = {}
        self._held: frozenset[str] = frozenset()
        self._began_at_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._stirred = asyncio.Event()

    def wake(self) -> None:
        """Look again soon: something changed that may change what is to be done."""
        self._stirred.set()

    async def serve(self) -> None:
        """Do what is to be done, until cancelled."""
        while True:
            self._stirred.clear()
            pause_s = self._reconcile()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stirred.wait()

    # What is asked of it.

    @contextmanager
    def request_load(self, model: Model) -> Iterator[None]:
        """Call a model for the length of the block; whoever calls it meanwhile shares its start."""
        number, model.refusal = next(self._numbers), None
        calls = self._calls.setdefault(model.entry.name, {})
        calls[number] = self._clock()
        self.wake()
        try:
            yield
        finally:
            del calls[number]
            self.wake()

    def command(self, verb: str, names: Sequence[str] = ()) -> Callable[[], bool]:
        """Begin what a command asks; return what tells whether that is over.

        Args:
            verb: `start` and `load` bring models up, making room if need be; `unload` sends them
                away until they are called; `stop` until they are started; `restart` as it says.
            names: The models; none means all, for `start` those that come up with the daemon.

        Raises:
            NoSuchModel: A name is not configured; nothing was begun.
            SettingsInvalid: The verb is none of these.
        """
        if verb in {"start", "load"}:
            return self._request_by_command(names)
        for model in self._fleet.select(names):
            self._wishes.pop(model.entry.name, None)
            model.is_open = verb == "restart" or (verb == "unload" and model.is_open)
            if verb == "stop" and self._calls.get(model.entry.name):
                self._emit("model.load_refused", model=model.entry.name, reason="it was stopped")
        self.wake()
        return self._fleet.command("stop" if verb == "unload" else verb, names)

    def _request_by_command(self, names: Sequence[str]) -> Callable[[], bool]:
        models = [one for one in self._fleet.select(names) if names or one.stay.preload]
        for model in models:
            model.is_open, model.refusal = True, None
            if phase_of(model, facts_of(model)) in {Phase.LOADED, Phase.LOADING}:
                self._load(model)
            else:
                self._wishes.setdefault(model.entry.name, self._clock())
        self.wake()
        return lambda: all(self._is_settled(model) for model in models)

    def _is_settled(self, model: Model) -> bool:
        is_waiting = model.entry.name in self._wishes
        return not is_waiting and {one.state for one in facts_of(model)} <= START_OVER

    def waiting(self) -> dict[str, Waiting]:
        """Return what waits, by the models it waits for, the first first."""
        claims = enumerate(queue(self._model_states()), 1)
        return {
            claim.name: Waiting(
                place,
                claim.waiting,
                claim.oldest_wait_s,
                tuple(sorted(self._held)) if place == 1 else (),
            )
            for place, claim in claims
        }

    # Doing it. Nothing from here on waits.

    def _reconcile(self) -> float | None:
        """Do what is to be done now; return after how long to look again, or None for no limit."""
        for model in self._fleet.models.values():
            self._time(model)
        models = self._model_states()
        rules = self._fleet.planner.supervisor
        moves = decide(models, self._memory_usage.capacity(), self._memory_usage.free(), rules)
        self._perform(moves)
        return moves.look_again_s

    def _time(self, model: Model) -> None:
        """Note how long a start took that is over."""
        name, phase = model.entry.name, phase_of(model, facts_of(model))
        if phase is not Phase.LOADING and name in self._began_at_s:
            took_s = self._clock() - self._began_at_s.pop(name)
            if phase is Phase.LOADED:
                self._took_s[name] = took_s

    def _model_states(self) -> list[ModelState]:
        return [
            self._model_state(model) for model in self._fleet.models.values() if model.is_configured
        ]

    def _model_state(self, model: Model) -> ModelState:
        name, now_s = model.entry.name, self._clock()
        facts = facts_of(model)
        phase, demand, calls = phase_of(model, facts), self._clients.demand(name), self._calls
        called_at_s = min(calls.get(name, {}).values(), default=now_s)
        called_at_s = min(called_at_s, self._wishes.get(name, now_s))
        resident_s = max(one.up_s for one in facts)
        takes = self._memory_usage.required(model)
        return ModelState(
            name=name,
            phase=phase,
            stay=model.stay,
            required=takes,
            is_wished=name in self._wishes,
            is_held=name in self._held,
            waiting=demand.waiting if phase is Phase.LOADED else len(calls.get(name, ())),
            oldest_wait_s=now_s - called_at_s,
            working=demand.working,
            idle_s=0.0 if demand.working else min(resident_s, now_s - demand.ended_at_s),
            resident_s=resident_s,
            progress=min(one.load_progress or 0.0 for one in facts),
            reload_cost_s=self._took_s.get(name, takes.get(HOST, 0) / _BYTES_PER_SECOND),
            cached_tokens=demand.cached_tokens,
        )

    def _perform(self, moves: Actions) -> None:
        for name in self._held.difference(moves.pause):
            self._clients.resume(name)
        for name in moves.pause:
            self._clients.pause(name)
        self._held = frozenset(moves.pause)
        for name, reason in moves.unload.items():
            self._unload(self._fleet.models[name], reason)
        for name in moves.load:
            self._load(self._fleet.models[name])
        for name, reason in moves.refuse.items():
            self._wishes.pop(name, None)
            self._fleet.models[name].refusal = reason
            self._emit("model.load_refused", model=name, reason=reason)

    def _load(self, model: Model) -> None:
        self._wishes.pop(model.entry.name, None)
        model.refusal = None
        self._began_at_s.setdefault(model.entry.name, self._clock())
        for replica in model.replicas:
            replica.instance.start()

    def _unload(self, model: Model, reason: str) -> None:
        self._emit("model.unloaded", model=model.entry.name, reason=reason)
        for replica in model.replicas:
            replica.instance.stop()
