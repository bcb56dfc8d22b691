"""Which models come into memory, and which leave it for them. Pure.

Whoever is called comes: at once where there is room, else once others have left. Claims are served
in order, those by command first, then those whose requests have waited longest, and none overtakes
one that waits for room: so requests for one model are served together while it is in, and a model
that needs much is not put off for ever by small ones. Who leaves, evict.py says; nobody does while
it works, nor, while others do, before it was idle for as long as its load took: its next question
may be on its way. Where nobody falls idle, those who must leave are given nothing new once a claim
has waited `swap_wait_s`, and leave when they have finished: a steady stream to one model never
starves another. A start that nobody waits for any more goes on; only while little of it is done,
and another needs the room, is it given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from supervisor.fleet import evict
from supervisor.fleet.evict import Bytes, Candidate, Verdict
from supervisor.fleet.guest import Guest, Phase, Rules

# The time of a program between an answer and its next question.
_MOMENT_S: Final = 0.25
# One that can never fit may try as well: its start says by how much, and what would fit.
_GO: Final = frozenset({Verdict.FITS, Verdict.NEVER})
_PRESENT: Final = frozenset({Phase.COMING, Phase.UP})


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be done now.

    Attributes:
        load: Models to bring up, first the first.
        unload: Models to send away, and why.
        hold: Models to give nothing new; all others are to be let go on.
        refuse: Claims that nothing can make room for, and why.
        look_again_s: After how long something else may be due, or None where only an event can
            change anything.
    """

    load: tuple[str, ...] = ()
    unload: Mapping[str, str] = field(default_factory=dict)
    hold: tuple[str, ...] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    look_again_s: float | None = None


def decide(guests: Sequence[Guest], room: Bytes, free: Bytes, rules: Rules) -> Moves:
    """Return what is to be done.

    Args:
        guests: Every model that may come, stay or go.
        room: What models may take of each memory when none is up.
        free: What they may still take now.
        rules: What the settings say.
    """
    load: list[str] = []
    made = Moves()
    for claim in queue(guests):
        found = _make_room(claim, guests, room, free, rules)
        if found is not None:
            made = found
            break
        load.append(claim.name)
        free = _less(free, claim.takes)
    expired = {guest.name: "nobody asked for it" for guest in guests if _ttl_left_s(guest) <= 0}
    soonest_s = min([made.look_again_s or math.inf, *map(_ttl_left_s, guests)])
    return replace(
        made,
        load=tuple(load),
        unload={**expired, **made.unload},
        look_again_s=soonest_s if soonest_s < math.inf else None,
    )


def queue(guests: Iterable[Guest]) -> list[Guest]:
    """Return the claims in the order in which they are served."""
    return sorted(filter(_is_claim, guests), key=_urgency)


def _is_claim(guest: Guest) -> bool:
    if guest.phase is Phase.BROKEN:
        return guest.is_wished
    return guest.phase is Phase.DOWN and (guest.is_wished or guest.waiting > 0)


def _urgency(claim: Guest) -> tuple[bool, float]:
    return not claim.is_wished, -claim.oldest_wait_s


def _make_room(
    claim: Guest, guests: Sequence[Guest], room: Bytes, free: Bytes, rules: Rules
) -> Moves | None:
    """Return what makes room for a claim, or None where it may come now."""
    soon = _more(free, [guest for guest in guests if guest.phase is Phase.GOING])
    if evict.decide(claim.takes, free, [], room=room, min_residency_s=0).verdict in _GO:
        return None
    movable = [guest for guest in guests if _is_movable(guest, rules)]
    due_s = 0.0 if claim.is_wished else rules.swap_wait_s - claim.oldest_wait_s
    idle = [guest for guest in movable if not guest.is_busy]
    is_quiet = not any(guest.is_busy for guest in guests if guest.phase in _PRESENT)
    lingering_s = {guest.name: _lingers_s(guest, is_quiet=is_quiet) for guest in idle}
    free_to_go = [guest for guest in idle if due_s <= 0 or not lingering_s[guest.name]]
    gently = _leavers(claim, free_to_go, room, soon)
    if gently is not None:
        return Moves(unload=_for(claim, gently))
    rest_s = _soonest(_residency_left_s(guest) for guest in movable)
    if due_s > 0:
        return Moves(look_again_s=min(due_s, rest_s, _soonest(lingering_s.values())))
    firmly = _leavers(claim, movable, room, soon)
    if firmly is not None:
        working = {guest.name for guest in movable if guest.working}
        done = [name for name in firmly if name not in working]
        return Moves(hold=firmly, unload=_for(claim, done))
    if rest_s < math.inf or any(guest.phase is Phase.COMING for guest in guests):
        return Moves(look_again_s=rest_s)
    return Moves(refuse={claim.name: _no_room(guests)})


def _leavers(
    claim: Guest, movable: Sequence[Guest], room: Bytes, free: Bytes
) -> tuple[str, ...] | None:
    """Return who must leave for a claim, nobody where room is on its way, None where all is not."""
    candidates = [_candidate(guest) for guest in movable]
    found = evict.decide(claim.takes, free, candidates, room=room, min_residency_s=0)
    return None if found.verdict is Verdict.WAIT else found.names


def _for(claim: Guest, leaving: Iterable[str]) -> Mapping[str, str]:
    return dict.fromkeys(leaving, f"{claim.name} needs its memory")


def _no_room(guests: Sequence[Guest]) -> str:
    pinned = [guest.name for guest in guests if guest.phase is Phase.UP and guest.stay.is_pinned]
    beside = f"beside {', '.join(pinned)}, which never leaves" if pinned else "on this machine now"
    return f"there is no memory for it {beside}"


def _is_movable(guest: Guest, rules: Rules) -> bool:
    if guest.phase is Phase.COMING:
        is_forsaken = not guest.waiting and not guest.is_wished
        return is_forsaken and guest.progress < rules.give_up_below
    return guest.phase is Phase.UP and not guest.stay.is_pinned


def _candidate(guest: Guest) -> Candidate:
    """Return a guest that may leave as evict.py sees it.

    It is older than nothing once it has stayed long enough, and one that is held already is worth
    least: the choice stands until it has left.
    """
    return Candidate(
        name=guest.name,
        model=guest.name,
        is_pinned=guest.stay.is_pinned,
        is_idle=True,
        idle_s=guest.idle_s,
        resident_s=-_residency_left_s(guest),
        reload_cost_s=0.0 if guest.is_held else guest.reload_cost_s,
        cached_tokens=0 if guest.is_held else guest.cached_tokens,
        frees=guest.takes,
    )


def _residency_left_s(guest: Guest) -> float:
    """Return how long a guest may not be sent away yet; a forsaken start may at once."""
    if guest.phase is Phase.COMING:
        return 0.0
    return max(0.0, guest.stay.min_residency_s - guest.resident_s)


def _lingers_s(guest: Guest, *, is_quiet: bool) -> float:
    """Return how long an idle guest may still wait for its next question.

    For as long as coming back costs: who guesses wrong loses that twice at most. Where nobody works
    there is nobody who would ask it.
    """
    if guest.phase is Phase.COMING:
        return 0.0
    patience_s = _MOMENT_S if is_quiet else max(_MOMENT_S, guest.reload_cost_s)
    return max(0.0, patience_s - guest.idle_s)


def _soonest(lefts_s: Iterable[float]) -> float:
    """Return the least of these times that are still to come; without limit where none is."""
    return min((left_s for left_s in lefts_s if left_s > 0), default=math.inf)


def _ttl_left_s(guest: Guest) -> float:
    """Return how long a guest may still be idle before it leaves of itself; often without limit."""
    stays = guest.phase is not Phase.UP or guest.is_busy or guest.stay.is_pinned
    if stays or not guest.stay.ttl_s:
        return math.inf
    return guest.stay.ttl_s - guest.idle_s


def _less(free: Bytes, takes: Bytes) -> Bytes:
    return {name: left - takes.get(name, 0) for name, left in free.items()}


def _more(free: Bytes, leaving: Sequence[Guest]) -> Mapping[str, int]:
    freed = dict(free)
    for guest in leaving:
        for name, size in guest.takes.items():
            freed[name] = freed.get(name, 0) + size
    return freed
