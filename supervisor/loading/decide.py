"""Decides which models to load, and which to unload for them. Pure.

A requested model is loaded at once where memory is free, else once others are unloaded. Models are
served in order, those of commands first, then those whose requests have waited longest. None
overtakes one that waits for memory, so that a model which needs much is not postponed for ever by
small ones, and requests for one model are served together while it is loaded. A model that only
another machine wants comes last, never waits, and takes the place of none that was used lately.

`_make_room` has the rules of unloading, and `evict.py` chooses among the models that may go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from supervisor.fleet.model import Phase
from supervisor.loading.memory_usage import Bytes, EvictionCandidate, choose_victims, fits
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy


@dataclass(frozen=True, slots=True)
class IdleLimit:
    """A limit in force.

    Attributes:
        seconds: Infinite for none.
        is_from_request: Whether a request gave it.
    """

    seconds: float
    is_from_request: bool = False

    @property
    def reason(self) -> str:
        """Why a model was unloaded that was idle as long."""
        if self.is_from_request:
            return f"the keep_alive of its latest request was {self.seconds:g} s"
        return "no request came within ttl_s"


def idle_limit(residency: ResidencyPolicy, keep_alive_s: float | None) -> IdleLimit:
    """Return the limit of a model whose requests gave `keep_alive_s` last, if they gave any."""
    if residency.pinned:
        return IdleLimit(math.inf)
    if keep_alive_s is None or not residency.keep_alive:
        return IdleLimit(residency.ttl_s or math.inf)
    most_s = math.inf if residency.keep_alive_max_s is None else residency.keep_alive_max_s
    return IdleLimit(min(keep_alive_s, most_s), is_from_request=True)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait for a model that is not loaded.

    Attributes:
        place: Its position among the models that wait, from 1.
        requests: How many wait; 0 where only a command does.
        leaving: Models that are paused to be unloaded for it.
    """

    place: int
    requests: int
    wait_s: float
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnloadTime:
    """When a loaded model is unloaded without requests.

    Attributes:
        in_s: From now; infinite while it is busy, or where it has no limit.
        limit: How long it may be idle.
    """

    in_s: float
    limit: IdleLimit


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model at one moment.

    Attributes:
        required: Bytes of each memory that it takes, or would take when loaded.
        is_commanded: Whether a command requests it.
        is_for_others: Whether another machine wants it loaded here.
        waiting: Requests that wait for it; `oldest_wait_s` includes the wait of a command.
        working: Requests that it is answering.
        idle_s: Seconds since the last of them ended; 0 while there are any.
        progress: Share of its load that is done, 0 to 1.
        keep_alive_s: What its requests gave last, if they gave any since it was loaded.
        cached_tokens: Tokens that would be computed again if it were unloaded.
    """

    name: str
    phase: Phase
    residency: ResidencyPolicy = ResidencyPolicy()  # noqa: RUF009 (frozen)
    required: Bytes = field(default_factory=dict)
    is_commanded: bool = False
    is_for_others: bool = False
    is_paused: bool = False
    waiting: int = 0
    oldest_wait_s: float = 0.0
    working: int = 0
    idle_s: float = 0.0
    resident_s: float = 0.0
    progress: float = 0.0
    reload_cost_s: float = 0.0
    cached_tokens: int = 0
    keep_alive_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.working)

    @property
    def is_only_for_others(self) -> bool:
        return self.is_for_others and not (self.is_commanded or self.waiting)

    @property
    def idle_limit(self) -> IdleLimit:
        return idle_limit(self.residency, self.keep_alive_s)

    @property
    def unload_in_s(self) -> float:
        """Seconds until it is unloaded unless a request comes; infinite where it is not."""
        if self.phase is not Phase.LOADED or self.is_busy:
            return math.inf
        return self.idle_limit.seconds - self.idle_s


# How long a program takes from a response to its next request.
_THINKING_S: Final = 0.25
_PRESENT: Final = frozenset({Phase.LOADING, Phase.LOADED})
# A model that was not used for so long may go for one that another machine wants.
_UNUSED_S: Final = 600.0
# How often to look whether a device has its memory back.
_RETURN_S: Final = 0.25
_NOTHING: Final[Bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Free:
    now: Bytes
    returning: Bytes


@dataclass(frozen=True, slots=True)
class Actions:
    """What to do now.

    Attributes:
        unload: Models to unload, with the reason.
        pause: Models to send no new requests; all others are resumed.
        refuse: Models that nothing can make room for, with the reason.
        look_again_s: Seconds until the decision may change without an event, if ever.
    """

    load: tuple[str, ...] = ()
    unload: Mapping[str, str] = field(default_factory=dict)
    pause: tuple[str, ...] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    look_again_s: float | None = None


def decide(
    models: Sequence[ModelState],
    capacity: Bytes,
    free: Bytes,
    rules: EvictionSettings,
    returning: Bytes = _NOTHING,
) -> Actions:
    """Decide for all configured models.

    Args:
        models: All of them.
        capacity: What they may take.
        free: What is left of it.
        rules: Of eviction.
        returning: What engines that have ended are yet to give back; it is not free.
    """
    load: list[str] = []
    room, returns_s = Actions(), math.inf
    for wanted in queue(models):
        left = _Free(free, returning)
        if wanted.is_only_for_others:
            found = _make_room_for_others(wanted, models, left, rules)
        else:
            found = _make_room(wanted, models, capacity, left, rules)
        if found is not None:
            room = found
            # No event tells when memory is back.
            returns_s = _RETURN_S if any(returning.values()) else math.inf
            break
        load.append(wanted.name)
        free = {name: size - wanted.required.get(name, 0) for name, size in free.items()}
    expired = {model.name: model.idle_limit.reason for model in models if model.unload_in_s <= 0}
    soonest_s = min(
        [room.look_again_s or math.inf, returns_s, *(model.unload_in_s for model in models)]
    )
    return replace(
        room,
        load=tuple(load),
        unload={**expired, **room.unload},
        look_again_s=soonest_s if soonest_s < math.inf else None,
    )


def queue(models: Iterable[ModelState]) -> list[ModelState]:
    return sorted(filter(_is_requested, models), key=_priority)


def _is_requested(model: ModelState) -> bool:
    if model.phase is Phase.FAILED:
        return model.is_commanded
    is_wanted = model.is_commanded or model.is_for_others or model.waiting > 0
    return model.phase is Phase.DOWN and is_wanted


def _priority(wanted: ModelState) -> tuple[bool, bool, float]:
    return wanted.is_only_for_others, not wanted.is_commanded, -wanted.oldest_wait_s


def _make_room(
    wanted: ModelState,
    models: Sequence[ModelState],
    capacity: Bytes,
    free: _Free,
    rules: EvictionSettings,
) -> Actions | None:
    """Return what makes room for a model, or None where it is to be loaded now."""
    # 1. There is room; or there never will be: then its start fails and reports what would fit.
    if fits(wanted.required, free.now) or not fits(wanted.required, capacity):
        return None
    free_soon = _free_soon(free, models)
    evictable = [model for model in models if _is_evictable(model, rules)]
    idle = [model for model in evictable if not model.is_busy]
    patience_s = 0.0 if wanted.is_commanded else rules.eviction_wait_s - wanted.oldest_wait_s
    graces_s = _graces_s(idle, models)
    # 2. Idle models are unloaded at once; within their grace, only after `eviction_wait_s`.
    idle_victims = _choose_victims(
        wanted, [model for model in idle if patience_s <= 0 or not graces_s[model.name]], free_soon
    )
    if idle_victims is not None:
        return Actions(unload=_reasons_for(wanted, idle_victims))
    # 3. Working models are left alone until then.
    residency_s = _soonest(map(_residency_left_s, evictable))
    if patience_s > 0:
        return Actions(look_again_s=min(patience_s, residency_s, _soonest(graces_s.values())))
    # 4. Then they get no new requests, and go when they have answered those they have.
    any_victims = _choose_victims(wanted, evictable, free_soon)
    if any_victims is not None:
        working = {model.name for model in evictable if model.working}
        done = [name for name in any_victims if name not in working]
        return Actions(pause=any_victims, unload=_reasons_for(wanted, done))
    # 5. A model that was just loaded, or still is loading, can go later; nothing else helps.
    if residency_s < math.inf or any(model.phase is Phase.LOADING for model in models):
        return Actions(look_again_s=residency_s)
    return Actions(refuse={wanted.name: _refusal(models)})


def _make_room_for_others(
    wanted: ModelState, models: Sequence[ModelState], free: _Free, rules: EvictionSettings
) -> Actions | None:
    if fits(wanted.required, free.now):
        return None
    loaded = [
        model for model in models if model.phase is Phase.LOADED and _is_evictable(model, rules)
    ]
    unused = [model for model in loaded if not model.is_busy and model.idle_s >= _UNUSED_S]
    victims = _choose_victims(wanted, unused, _free_soon(free, models))
    if victims is None:
        return Actions(refuse={wanted.name: "there is no memory for it beside what is in use"})
    return Actions(unload=_reasons_for(wanted, victims))


def _free_soon(free: _Free, models: Iterable[ModelState]) -> Bytes:
    """Include what the models take that are unloading now, and what comes back."""
    total = Counter(dict(free.now))
    total.update(free.returning)
    for model in models:
        if model.phase is Phase.UNLOADING:
            for name, size in model.required.items():
                total[name] += size
    return total


def _is_evictable(model: ModelState, rules: EvictionSettings) -> bool:
    """Return whether a model can go at all: now, or once it is idle or resident long enough."""
    if model.residency.pinned:
        return False
    if model.phase is Phase.LOADING:
        is_unneeded = not model.waiting and not model.is_commanded
        return is_unneeded and model.progress < rules.abandon_load_below
    return model.phase is Phase.LOADED


def _graces_s(idle: Iterable[ModelState], models: Iterable[ModelState]) -> dict[str, float]:
    is_quiet = not any(model.is_busy for model in models if model.phase in _PRESENT)
    return {model.name: _grace_s(model, is_quiet=is_quiet) for model in idle}


def _grace_s(model: ModelState, *, is_quiet: bool) -> float:
    """Return how long an idle model is still kept for its next request.

    As long as reloading takes: a wrong guess costs twice that at most. Where no model is busy,
    there is no client whose next request may be on its way.
    """
    if model.phase is Phase.LOADING:
        return 0.0
    grace_s = _THINKING_S if is_quiet else max(_THINKING_S, model.reload_cost_s)
    return max(0.0, grace_s - model.idle_s)


def _residency_left_s(model: ModelState) -> float:
    """Return how long a model must still stay; a load that nothing waits for need not."""
    if model.phase is Phase.LOADING:
        return 0.0
    return max(0.0, model.residency.min_residency_s - model.resident_s)


def _choose_victims(
    wanted: ModelState, models: Iterable[ModelState], free: Bytes
) -> tuple[str, ...] | None:
    candidates = [_candidate(model) for model in models if not _residency_left_s(model)]
    return choose_victims(wanted.required, free, candidates)


def _candidate(model: ModelState) -> EvictionCandidate:
    # A paused model is worth least, so that the choice stands until it is unloaded.
    return EvictionCandidate(
        name=model.name,
        idle_s=model.idle_s,
        reload_cost_s=0.0 if model.is_paused else model.reload_cost_s,
        cached_tokens=0 if model.is_paused else model.cached_tokens,
        frees=model.required,
    )


def _reasons_for(wanted: ModelState, victims: Iterable[str]) -> Mapping[str, str]:
    return dict.fromkeys(victims, f"{wanted.name} needs its memory")


def _refusal(models: Iterable[ModelState]) -> str:
    loaded = (model for model in models if model.phase is Phase.LOADED)
    pinned = ", ".join(model.name for model in loaded if model.residency.pinned)
    return "there is no memory for it " + (
        f"beside {pinned}, which never leaves" if pinned else "on this machine now"
    )


def _soonest(times_s: Iterable[float]) -> float:
    """Return the shortest time above 0; infinite where there is none."""
    return min((time_s for time_s in times_s if time_s > 0), default=math.inf)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Room for a model.

    Attributes:
        models: Those that would be unloaded for it.
        wait_s: How long it waits before that at least.
        refusal: Why it would not be loaded; None: it would.
    """

    models: tuple[str, ...] = ()
    wait_s: float = 0.0
    refusal: str | None = None


def eviction(
    name: str,
    models: Sequence[ModelState],
    decide: Callable[[Sequence[ModelState]], Actions],
    patience_s: float,
) -> Eviction:
    """Return what would be unloaded for a model if a request came now.

    Args:
        name: The model.
        models: All of them.
        decide: Decides what is to be done.
        patience_s: How long a request waits for memory before working models are unloaded.
    """
    now = _eviction_of(name, decide(_add_request(name, models, 0.0)), models, 0.0)
    if now is not None:
        return now
    later = decide(_add_request(name, models, patience_s))
    return _eviction_of(name, later, models, patience_s) or Eviction(wait_s=patience_s)


def _add_request(name: str, models: Sequence[ModelState], waited_s: float) -> list[ModelState]:
    return [
        replace(
            model,
            waiting=max(1, model.waiting),
            oldest_wait_s=max(waited_s, model.oldest_wait_s),
        )
        if model.name == name
        else model
        for model in models
    ]


def _eviction_of(
    name: str, actions: Actions, models: Sequence[ModelState], waited_s: float
) -> Eviction | None:
    """Return None where nothing would be done yet."""
    if name in actions.load:
        return Eviction()
    if name in actions.refuse:
        return Eviction(refusal=actions.refuse[name])
    expired = {model.name for model in models if model.unload_in_s <= 0}
    found = dict.fromkeys((*actions.unload, *actions.pause))
    victims = tuple(victim for victim in found if victim not in expired and victim != name)
    return Eviction(victims, waited_s) if victims else None
