"""Decides which models to load, and which to unload for them. Pure.

A requested model is loaded at once if memory is free and the rules of its groups
(`settings/groups.py`) allow it beside the loaded ones, otherwise once others are unloaded. Models
are served in order: those of commands first, then those whose requests have waited longest. None
overtakes a model that waits for memory, so that small models do not postpone a large one for ever,
and requests for the same model are served together while it is loaded. A model that only another
machine wants comes last, never waits, and replaces no model that was used lately.

`_make_room` has the rules of unloading, `give_way` adds those for other programs that need a
device; `Admission.victims` chooses among the models that may go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from supervisor.fleet.model import Phase
from supervisor.loading.memory_usage import Bytes, fits
from supervisor.settings.groups import Groups, Rule
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy

# SmolLM2-135M computes 165 prompt tokens per second on one core. Only the order of candidates
# depends on this.
_SECONDS_PER_TOKEN: Final = 0.006


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait for a model that is not loaded."""

    place: int  # its position among the waiting models, from 1
    rule: Rule | None  # the rule by which others must go first; None if it waits for memory
    requests: int  # the number of waiting requests; 0 if only a command waits
    wait_s: float
    leaving: tuple[str, ...]  # the models that are paused to be unloaded for it


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of a model that decisions depend on."""

    name: str
    phase: Phase
    residency: ResidencyPolicy = ResidencyPolicy()  # noqa: RUF009 (frozen)
    # Bytes of each memory that it takes, or would take when loaded.
    required: Bytes = field(default_factory=dict)
    is_commanded: bool = False  # whether a command requests it
    is_for_others: bool = False  # whether another machine wants it loaded here
    is_paused: bool = False
    waiting: int = 0  # requests that wait for it; `oldest_wait_s` includes the wait of a command
    oldest_wait_s: float = 0.0
    working: int = 0  # requests that it is answering
    idle_s: float = 0.0  # seconds since the last of these ended; 0 while there are any
    resident_s: float = 0.0
    progress: float = 0.0  # the finished share of its load, 0 to 1
    reload_cost_s: float = 0.0
    cached_tokens: int = 0  # tokens that must be computed again if it is unloaded
    # The keep_alive of its latest request since it was loaded, if any.
    keep_alive_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.working)

    @property
    def is_only_for_others(self) -> bool:
        return self.is_for_others and not (self.is_commanded or self.waiting)

    @property
    def follows_request(self) -> bool:
        """Whether the keep_alive of its latest request limits how long it may be idle."""
        its = self.residency
        return not its.pinned and its.keep_alive and self.keep_alive_s is not None

    @property
    def idle_limit_s(self) -> float:
        """How long it may be idle until it is unloaded; infinite if there is no limit."""
        its = self.residency
        if self.keep_alive_s is None or not self.follows_request:
            return math.inf if its.pinned else its.ttl_s or math.inf
        return min(
            self.keep_alive_s, math.inf if its.keep_alive_max_s is None else its.keep_alive_max_s
        )

    @property
    def unload_reason(self) -> str:
        if self.follows_request:
            return f"the keep_alive of its latest request was {self.idle_limit_s:g} s"
        return "no request came within ttl_s"

    @property
    def eviction_value(self) -> tuple[float, str]:
        """Sort key, the least valuable first; the name breaks ties.

        An hour idle weighs as much as an hour of reloading. A paused model has the least value, so
        that the choice stands until it is unloaded.
        """
        return_cost_s = self.reload_cost_s + self.cached_tokens * _SECONDS_PER_TOKEN
        return 0.0 if self.is_paused else return_cost_s / (1 + self.idle_s), self.name

    @property
    def unload_in_s(self) -> float:
        """Seconds until it is unloaded if no request comes; infinite if busy or unlimited."""
        if self.phase != "loaded" or self.is_busy:
            return math.inf
        return self.idle_limit_s - self.idle_s


# The usual time of a program between a response and its next request.
_THINKING_S: Final = 0.25
# A model that was not used for this time may be unloaded for a model that another machine wants.
_UNUSED_S: Final = 600.0
# How often to check whether the memory of a device was returned.
_RETURN_S: Final = 0.25
_NOTHING: Final[Bytes] = MappingProxyType({})
_NO_GROUPS: Final = Groups()
_PRESENT: Final = frozenset({"loading", "loaded"})


# Why devices are yielded.
OTHER_PROGRAMS: Final = "other programs"


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    devices: frozenset[str]  # of which they need more memory than is free
    may_pause: bool  # whether busy models give way too, once they have answered


@dataclass(frozen=True, slots=True)
class Actions:
    load: tuple[str, ...] = ()
    unload: Mapping[str, str] = field(default_factory=dict)  # models to unload, with the reason
    pause: tuple[str, ...] = ()  # models that get no new requests; all others are resumed
    give_way: tuple[str, ...] = ()  # those of `unload` that give way to other programs
    # Models that cannot get memory, with the reason.
    refuse: Mapping[str, str] = field(default_factory=dict)
    # Seconds until the decision may change without an event, if ever.
    look_again_s: float | None = None


def decide(
    models: Sequence[ModelState],
    capacity: Bytes,
    free: Bytes,
    rules: EvictionSettings,
    returning: Bytes = _NOTHING,
    groups: Groups = _NO_GROUPS,
) -> Actions:
    """Decide about all configured models, by the memory that they may take and its free part.

    `returning` is memory that ended engines have yet to return; it is not free.
    """
    load: list[str] = []
    room, returns_s = Actions(), math.inf
    for wanted in queue(models):
        leaving = [model for model in models if model.phase == "unloading"]
        present = frozenset(model.name for model in models if model.phase in _PRESENT)
        free_soon = _with(free, [returning, *(model.required for model in leaving)])
        now = Admission(wanted, free, present.union(model.name for model in leaving), groups)
        soon = Admission(wanted, free_soon, present, groups)
        if now.is_possible():
            found = None
        elif wanted.is_only_for_others:
            found = _make_room_for_others(soon, models, rules)
        else:
            found = _make_room(soon, models, capacity, rules)
        if found is not None:
            room = found
            # No event reports that memory was returned.
            returns_s = _RETURN_S if any(returning.values()) else math.inf
            break
        load.append(wanted.name)
        models = [replace(each, phase="loading") if each is wanted else each for each in models]
        free = {name: size - wanted.required.get(name, 0) for name, size in free.items()}
    expired = {model.name: model.unload_reason for model in models if model.unload_in_s <= 0}
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
    return sorted(
        filter(_is_requested, models),
        key=lambda wanted: (
            wanted.is_only_for_others,
            not wanted.is_commanded,
            -wanted.oldest_wait_s,
        ),
    )


def _is_requested(model: ModelState) -> bool:
    if model.phase == "failed":
        return model.is_commanded
    is_wanted = model.is_commanded or model.is_for_others or model.waiting > 0
    return model.phase == "down" and is_wanted


def _make_room(
    admission: Admission, models: Sequence[ModelState], capacity: Bytes, rules: EvictionSettings
) -> Actions | None:
    """Return the actions that make room for a model, or None to load it now."""
    wanted = admission.wanted
    # 1. There never will be room: then its start fails and reports settings that would fit.
    if not fits(wanted.required, capacity):
        return None
    evictable = [model for model in models if admission.may_unload(model, rules)]
    idle = [model for model in evictable if not model.is_busy]
    patience_s = 0.0 if wanted.is_commanded else rules.eviction_wait_s - wanted.oldest_wait_s
    is_quiet = not any(model.is_busy for model in models if model.phase in _PRESENT)
    graces_s = {model.name: _grace_s(model, is_quiet=is_quiet) for model in idle}
    # 2. Idle models are unloaded at once; within their grace, only after `eviction_wait_s`.
    idle_victims = admission.victims(
        model for model in idle if patience_s <= 0 or not graces_s[model.name]
    )
    if idle_victims is not None:
        return Actions(unload=admission.reasons(idle_victims))
    # 3. Working models stay until then.
    residency_s = _soonest(map(_residency_left_s, evictable))
    if patience_s > 0:
        return Actions(look_again_s=min(patience_s, residency_s, _soonest(graces_s.values())))
    # 4. Then they get no new requests, and go when they have answered the present ones.
    any_victims = admission.victims(evictable)
    if any_victims is not None:
        working = {model.name for model in evictable if model.working}
        done = [name for name in any_victims if name not in working]
        return Actions(pause=any_victims, unload=admission.reasons(done))
    # 5. Only a model that was just loaded, or is still loading, may go later.
    if residency_s < math.inf or any(model.phase == "loading" for model in models):
        return Actions(look_again_s=residency_s)
    loaded = [model for model in models if model.phase == "loaded"]
    stays = ", ".join(model.name for model in loaded if not admission.may_unload(model, rules))
    beside = f"beside {stays}, which no request for it unloads" if stays else "on this machine now"
    reason = str(admission.rule or f"there is no memory for it {beside}")
    return Actions(refuse={wanted.name: reason})


def _make_room_for_others(
    admission: Admission, models: Sequence[ModelState], rules: EvictionSettings
) -> Actions:
    may_go = [model for model in models if admission.may_unload(model, rules)]
    loaded = [model for model in may_go if model.phase == "loaded"]
    unused = [model for model in loaded if not model.is_busy and model.idle_s >= _UNUSED_S]
    victims = admission.victims(unused)
    if victims is None:
        reason = str(admission.rule or "too little memory is free for it")
        return Actions(refuse={admission.wanted.name: reason})
    return Actions(unload=admission.reasons(victims))


def give_way(
    actions: Actions,
    models: Sequence[ModelState],
    free: Bytes,
    returning: Bytes,
    others: OtherPrograms,
) -> Actions:
    """Add the models that give way to other programs.

    The free memory of a device that these need is without the reserve, and may be less than 0.
    """
    leaving = [
        model for model in models if model.phase == "unloading" or model.name in actions.unload
    ]
    free = _with(free, [returning, *(model.required for model in leaving)])
    short = sorted(name for name in others.devices if free.get(name, 0) < 0)
    candidates = [
        model
        for model in models
        if model.phase == "loaded"
        and model not in leaving
        and not model.residency.pinned
        and any(model.required.get(name) for name in short)
        and (others.may_pause or not model.is_busy)
    ]
    # One byte more than the reserve.
    program = Admission(ModelState("", "down", required=dict.fromkeys(short, 1)), free)
    victims = program.victims(model for model in candidates if not model.is_busy or model.is_paused)
    if victims is None:
        victims = program.victims(candidates)
    if victims is None:  # too little, but of use to the other programs
        victims = tuple(model.name for model in candidates if not _residency_left_s(model))
    working = {model.name for model in candidates if model.working}
    reason = f"other programs need memory of {' and '.join(short)}"
    gone = {name: reason for name in victims if name not in working}
    answering = [name for name in victims if name in working]
    return replace(
        actions,
        unload={**actions.unload, **gone},
        pause=tuple(dict.fromkeys((*actions.pause, *answering))),
        give_way=tuple(gone),
    )


def _with(free: Bytes, more: Iterable[Bytes]) -> Bytes:
    total = Counter(dict(free))
    for size_bytes in more:
        total.update(size_bytes)
    return total


def _grace_s(model: ModelState, *, is_quiet: bool) -> float:
    """Return how long an idle model still stays for its next request.

    That is the time of reloading it, so a wrong guess costs at most twice as much. If no model is
    busy, there is no client that may be about to send its next request.
    """
    if model.phase == "loading":
        return 0.0
    grace_s = _THINKING_S if is_quiet else max(_THINKING_S, model.reload_cost_s)
    return max(0.0, grace_s - model.idle_s)


def _residency_left_s(model: ModelState) -> float:
    """Return how long a model must still stay; 0 for a load that nothing waits for."""
    if model.phase == "loading":
        return 0.0
    return max(0.0, model.residency.min_residency_s - model.resident_s)


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether and how a model can be loaded: by free memory, and beside the models present."""

    wanted: ModelState
    free: Bytes
    present: frozenset[str] = frozenset()
    groups: Groups = _NO_GROUPS

    @property
    def rule(self) -> Rule | None:
        """The rule by which others must go first; None if only memory may be missing."""
        return self.groups.rule_against(self.wanted.name, self.present)

    def is_possible(self, unloaded: Sequence[ModelState] = ()) -> bool:
        """Return whether it can be loaded once these models are unloaded."""
        free = _with(self.free, (model.required for model in unloaded))
        others = self.present.difference(model.name for model in unloaded)
        is_allowed = not self.groups.rule_against(self.wanted.name, others)
        return is_allowed and fits(self.wanted.required, free)

    def may_unload(self, model: ModelState, rules: EvictionSettings) -> bool:
        """Return whether a model may go now, or once it is idle or resident long enough."""
        if model.residency.pinned or model.name in self.groups.kept_for(self.wanted.name):
            return False
        if model.phase == "loading":
            is_unneeded = not model.waiting and not model.is_commanded
            return is_unneeded and model.progress < rules.abandon_load_below
        return model.phase == "loaded"

    def victims(self, models: Iterable[ModelState]) -> tuple[str, ...] | None:
        """Return the models to unload, in order, none just loaded; None if all are not enough."""
        candidates = [model for model in models if not _residency_left_s(model)]
        chosen: list[ModelState] = []
        for candidate in sorted(candidates, key=lambda candidate: candidate.eviction_value):
            if self.is_possible(chosen):
                break
            chosen.append(candidate)
        if not self.is_possible(chosen):
            return None
        for spared in reversed(tuple(chosen)):
            others = [candidate for candidate in chosen if candidate is not spared]
            if self.is_possible(others):
                chosen = others
        return tuple(candidate.name for candidate in chosen)

    def reasons(self, victims: Sequence[str]) -> Mapping[str, str]:
        """Return why each of these must go: the rule that it would break, or memory."""
        name, others = self.wanted.name, self.present.difference(victims)
        rules = {victim: self.groups.rule_against(name, {*others, victim}) for victim in victims}
        return {
            victim: f"{name} was requested: {rule}" if rule else f"{name} needs its memory"
            for victim, rule in rules.items()
        }


def _soonest(times_s: Iterable[float]) -> float:
    return min((time_s for time_s in times_s if time_s > 0), default=math.inf)


def rule_against(name: str, models: Iterable[ModelState], groups: Groups) -> Rule | None:
    """Return the rule by which other models must go before a model is loaded, or None."""
    phases = {*_PRESENT, "unloading"}
    return groups.rule_against(name, {model.name for model in models if model.phase in phases})


@dataclass(frozen=True, slots=True)
class Eviction:
    """How a model would get memory."""

    models: tuple[str, ...] = ()  # the models that would be unloaded for it
    wait_s: float = 0.0  # the least wait before that
    refusal: str | None = None  # why it would not be loaded
    rule: Rule | None = None  # the rule by which these models would go; None: memory


def eviction(
    name: str,
    models: Sequence[ModelState],
    decide: Callable[[Sequence[ModelState]], Actions],
    patience_s: float,
) -> Eviction:
    """Return the models that would be unloaded for a model if a request came now.

    `patience_s` is the time for which a request waits before working models are unloaded.
    """
    now = _eviction_of(name, decide(_add_request(name, models, 0.0)), models, 0.0)
    if now is not None:
        return now
    later = decide(_add_request(name, models, patience_s))
    return _eviction_of(name, later, models, patience_s) or Eviction(wait_s=patience_s)


def _add_request(name: str, models: Sequence[ModelState], waited_s: float) -> list[ModelState]:
    return [
        replace(
            model, waiting=max(1, model.waiting), oldest_wait_s=max(waited_s, model.oldest_wait_s)
        )
        if model.name == name
        else model
        for model in models
    ]


def _eviction_of(
    name: str, actions: Actions, models: Sequence[ModelState], waited_s: float
) -> Eviction | None:
    """Return None if nothing would happen yet."""
    if name in actions.load:
        return Eviction()
    if name in actions.refuse:
        return Eviction(refusal=actions.refuse[name])
    expired = {model.name for model in models if model.unload_in_s <= 0}
    found = dict.fromkeys((*actions.unload, *actions.pause))
    victims = tuple(victim for victim in found if victim not in expired and victim != name)
    return Eviction(victims, waited_s) if victims else None
