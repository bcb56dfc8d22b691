"""Which models come into memory, and which leave it for them. Pure.

Whoever is called comes: at once where there is room, else once others have left. Claims are served
in order, those by command first, then those whose requests have waited longest, and none overtakes
one that waits for room: so requests for one model are served together while it is in, and a model
that needs much is not put off for ever by small ones. Who leaves, evict.py says; nobody does while
it works, nor, while others do, before it was idle for as long as its load took: its next question
may be on its way. Where nobody falls idle, those who must leave are given nothing new once a claim
has waited `eviction_wait_s`, and leave when they have finished: a steady stream to one model never
starves another. A start that nobody waits for any more goes on; only while little of it is done,
and another needs the room, is it given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from supervisor.admission import evict
from supervisor.admission.evict import Bytes, EvictionCandidate, EvictionVerdict
from supervisor.admission.model_state import ModelState
from supervisor.fleet.availability import Phase
from supervisor.settings.schema import EvictionSettings

# The time of a program between an answer and its next question.
_MOMENT_S: Final = 0.25
# One that can never fit may try as well: its start says by how much, and what would fit.
_GO: Final = frozenset({EvictionVerdict.FITS, EvictionVerdict.NEVER})
_PRESENT: Final = frozenset({Phase.LOADING, Phase.LOADED})


@dataclass(frozen=True, slots=True)
class Actions:
    """What is to be done now.

    Attributes:
        load: Models to bring up, first the first.
        unload: Models to send away, and why.
        pause: Models to give nothing new; all others are to be let go on.
        refuse: Claims that nothing can make room for, and why.
        look_again_s: After how long something else may be due, or None where only an event can
            change anything.
    """

    load: tuple[str, ...] = ()
    unload: Mapping[str, str] = field(default_factory=dict)
    pause: tuple[str, ...] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    look_again_s: float | None = None


def decide(
    models: Sequence[ModelState], room: Bytes, free: Bytes, rules: EvictionSettings
) -> Actions:
    """Return what is to be done.

    Args:
        models: Every model that may come, stay or go.
        room: What models may take of each memory when none is up.
        free: What they may still take now.
        rules: What the settings say.
    """
    load: list[str] = []
    made = Actions()
    for claim in queue(models):
        found = _make_room(claim, models, room, free, rules)
        if found is not None:
            made = found
            break
        load.append(claim.name)
        free = _less(free, claim.required)
    expired = {model.name: "nobody asked for it" for model in models if _ttl_left_s(model) <= 0}
    soonest_s = min([made.look_again_s or math.inf, *map(_ttl_left_s, models)])
    return replace(
        made,
        load=tuple(load),
        unload={**expired, **made.unload},
        look_again_s=soonest_s if soonest_s < math.inf else None,
    )


def queue(models: Iterable[ModelState]) -> list[ModelState]:
    """Return the claims in the order in which they are served."""
    return sorted(filter(_is_requested, models), key=_priority)


def _is_requested(model: ModelState) -> bool:
    if model.phase is Phase.FAILED:
        return model.is_wished
    return model.phase is Phase.DOWN and (model.is_wished or model.waiting > 0)


def _priority(claim: ModelState) -> tuple[bool, float]:
    return not claim.is_wished, -claim.oldest_wait_s


def _make_room(
    claim: ModelState,
    models: Sequence[ModelState],
    room: Bytes,
    free: Bytes,
    rules: EvictionSettings,
) -> Actions | None:
    """Return what makes room for a claim, or None where it may come now."""
    soon = _more(free, [model for model in models if model.phase is Phase.UNLOADING])
    if evict.decide(claim.required, free, [], room=room, min_residency_s=0).verdict in _GO:
        return None
    movable = [model for model in models if _is_evictable(model, rules)]
    due_s = 0.0 if claim.is_wished else rules.eviction_wait_s - claim.oldest_wait_s
    idle = [model for model in movable if not model.is_busy]
    is_quiet = not any(model.is_busy for model in models if model.phase in _PRESENT)
    lingering_s = {model.name: _grace_s(model, is_quiet=is_quiet) for model in idle}
    free_to_go = [model for model in idle if due_s <= 0 or not lingering_s[model.name]]
    gently = _choose_victims(claim, free_to_go, room, soon)
    if gently is not None:
        return Actions(unload=_for(claim, gently))
    rest_s = _soonest(_residency_left_s(model) for model in movable)
    if due_s > 0:
        return Actions(look_again_s=min(due_s, rest_s, _soonest(lingering_s.values())))
    firmly = _choose_victims(claim, movable, room, soon)
    if firmly is not None:
        working = {model.name for model in movable if model.working}
        done = [name for name in firmly if name not in working]
        return Actions(pause=firmly, unload=_for(claim, done))
    if rest_s < math.inf or any(model.phase is Phase.LOADING for model in models):
        return Actions(look_again_s=rest_s)
    return Actions(refuse={claim.name: _no_room(models)})


def _choose_victims(
    claim: ModelState, movable: Sequence[ModelState], room: Bytes, free: Bytes
) -> tuple[str, ...] | None:
    """Return who must leave for a claim, nobody where room is on its way, None where all is not."""
    candidates = [_candidate(model) for model in movable]
    found = evict.decide(claim.required, free, candidates, room=room, min_residency_s=0)
    return None if found.verdict is EvictionVerdict.WAIT else found.names


def _for(claim: ModelState, leaving: Iterable[str]) -> Mapping[str, str]:
    return dict.fromkeys(leaving, f"{claim.name} needs its memory")


def _no_room(models: Sequence[ModelState]) -> str:
    pinned = [model.name for model in models if model.phase is Phase.LOADED and model.stay.pinned]
    beside = f"beside {', '.join(pinned)}, which never leaves" if pinned else "on this machine now"
    return f"there is no memory for it {beside}"


def _is_evictable(model: ModelState, rules: EvictionSettings) -> bool:
    if model.phase is Phase.LOADING:
        is_forsaken = not model.waiting and not model.is_wished
        return is_forsaken and model.progress < rules.abandon_load_below
    return model.phase is Phase.LOADED and not model.stay.pinned


def _candidate(model: ModelState) -> EvictionCandidate:
    """Return a model that may leave as evict.py sees it.

    It is older than nothing once it has stayed long enough, and one that is held already is worth
    least: the choice stands until it has left.
    """
    return EvictionCandidate(
        name=model.name,
        model=model.name,
        is_pinned=model.stay.pinned,
        is_idle=True,
        idle_s=model.idle_s,
        resident_s=-_residency_left_s(model),
        reload_cost_s=0.0 if model.is_held else model.reload_cost_s,
        cached_tokens=0 if model.is_held else model.cached_tokens,
        frees=model.required,
    )


def _residency_left_s(model: ModelState) -> float:
    """Return how long a model may not be sent away yet; a forsaken start may at once."""
    if model.phase is Phase.LOADING:
        return 0.0
    return max(0.0, model.stay.min_residency_s - model.resident_s)


def _grace_s(model: ModelState, *, is_quiet: bool) -> float:
    """Return how long an idle model may still wait for its next question.

    For as long as coming back costs: who guesses wrong loses that twice at most. Where nobody works
    there is nobody who would ask it.
    """
    if model.phase is Phase.LOADING:
        return 0.0
    queue_timeout_s = _MOMENT_S if is_quiet else max(_MOMENT_S, model.reload_cost_s)
    return max(0.0, queue_timeout_s - model.idle_s)


def _soonest(lefts_s: Iterable[float]) -> float:
    """Return the least of these times that are still to come; without limit where none is."""
    return min((left_s for left_s in lefts_s if left_s > 0), default=math.inf)


def _ttl_left_s(model: ModelState) -> float:
    """Return how long a model may still be idle before it leaves of itself; often without limit."""
    stays = model.phase is not Phase.LOADED or model.is_busy or model.stay.pinned
    if stays or not model.stay.ttl_s:
        return math.inf
    return model.stay.ttl_s - model.idle_s


def _less(free: Bytes, takes: Bytes) -> Bytes:
    return {name: left - takes.get(name, 0) for name, left in free.items()}


def _more(free: Bytes, leaving: Sequence[ModelState]) -> Mapping[str, int]:
    freed = dict(free)
    for model in leaving:
        for name, size in model.required.items():
            freed[name] = freed.get(name, 0) + size
    return freed
