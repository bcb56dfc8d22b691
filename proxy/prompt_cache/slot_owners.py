"""Whose tokens an engine can find for a request, where keys share no caches. Pure.

An engine reuses whatever a slot or its host cache has of a prompt. So a request of an owner that is
alone names its slot, in which the engine then looks alone, and says `cache_prompt: false` unless
that slot is known to hold only tokens of its owner: then nothing is reused, and what the slot holds
afterwards is its owner's. A request that names no slot can get each, and a copy of any.

Requests that are sent in the same moment can reach the engine in another order. So one that names
no slot waits while another owner's, which may reuse what it finds, has been sent and its slot is
not in use yet: the former could take that slot first, and leave in it what the latter then reuses.

That costs nothing as long as a process has computed prompts of one owner alone.

An engine whose vectors are made with the pooling `last` reuses what the slot has of a text, and
takes neither `id_slot` nor `cache_prompt` for it: there the requests of one owner run at a time,
and the slots are cleared before those of the next (`has_only`, `are_in_engine`, `clear`).

Source: measured on build 10434: with `cache_prompt: false` `cache_n` is 0 in every API but
Anthropic's, which ignores it, whatever slots and the host cache hold. Of `/embedding` and
`/v1/rerank`, `prompt_tokens_cached_total` stays 0 with every pooling but `last`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from proxy.prompt_cache.prompt import ANYONE, CacheOwner


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A request, from before it is sent until the engine is known to have given it a slot."""

    owner: CacheOwner
    id_slot: int | None
    is_reusing: bool


@cache
def _shared(id_slot: int | None) -> _Sent:
    """Return a request of an owner that shares caches, as nearly all are; slots are few."""
    return _Sent(ANYONE, id_slot, is_reusing=True)


class SlotOwners:
    """Of one process; `is_new`: its slots were empty when it began. A holder is a lease.

    Attributes:
        has_shared: Whether a request was sent whose owner shares caches.
        has_alone: Whether one was sent whose owner does not.
    """

    def __init__(self, *, is_new: bool = True) -> None:
        self.has_shared = False
        self.has_alone = False
        self._is_new = is_new
        self._alone = ANYONE  # the latest
        self._has_several = False
        self._by_slot: dict[int, CacheOwner] = {}
        self._named: dict[
            int, CacheOwner
        ] = {}  # by requests that no unnamed one can have displaced
        self._sent: dict[object, _Sent] = {}
        self._in_engine: dict[object, CacheOwner] = {}
        self._only: CacheOwner | None = None

    def has_others(self, owner: CacheOwner) -> bool:
        """Return whether an engine could find tokens of another owner."""
        if not owner.is_alone:
            return self.has_alone
        is_first = self._alone in {ANYONE, owner}
        return self.has_shared or self._has_several or not self._is_new or not is_first

    def may_reuse(self, owner: CacheOwner, id_slot: int | None) -> bool:
        """Return whether a request may reuse what the engine finds; None: it names no slot."""
        if not self.has_others(owner):
            return True
        return id_slot is not None and self._by_slot.get(id_slot) == _group(owner)

    def begin(self, holder: object, owner: CacheOwner, id_slot: int | None) -> bool:
        """Note that a request is to be sent, once `awaited` is empty; return whether it may reuse.

        What its slot holds is not certain until it has ended.
        """
        self._sent.pop(holder, None)
        if not (owner.is_alone or self.has_alone):
            self.has_shared = True
            self._sent[holder], self._in_engine[holder] = _shared(id_slot), ANYONE
            return True
        is_reusing, group = self.may_reuse(owner, id_slot), _group(owner)
        if owner.is_alone:
            self._has_several = self._has_several or (self.has_alone and self._alone != owner)
            self._alone, self.has_alone = owner, True
        else:
            self.has_shared = True
        if id_slot is None:
            self._by_slot.clear()
            self._named.clear()
        else:
            if self._by_slot.get(id_slot) != group:
                self._by_slot.pop(id_slot, None)
            self._note_named(group, id_slot)
        self._sent[holder] = _Sent(group, id_slot, is_reusing)
        self._in_engine[holder] = group
        return is_reusing

    def awaited(self, holder: object) -> bool:
        """Return whether a request must wait until earlier ones have their slots.

        It could take the slot of another owner's that may reuse what it finds, or the other its.
        """
        if not self.has_alone:
            return False
        own = self._sent.get(holder)
        earlier = takewhile(lambda other: other is not holder, self._sent)
        return own is not None and any(_may_meet(self._sent[other], own) for other in earlier)

    def placed(self, holder: object) -> None:
        """Note that a request has its slot, or will get none."""
        self._sent.pop(holder, None)

    def released(self, holder: object) -> None:
        """Note that a request is over, and the engine computes nothing more for it."""
        self._sent.pop(holder, None)
        self._in_engine.pop(holder, None)

    def fill(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that a slot was filled with tokens of an owner; its request is sent next."""
        if id_slot is not None:
            self._note_named(_group(owner), id_slot)
            self.end(owner, id_slot)

    def end(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that the engine has told what it computed for a request that named its slot.

        The slot holds only tokens of its owner, unless another request can have taken it.
        """
        if id_slot is not None and self._named.pop(id_slot, None) == _group(owner):
            self._by_slot[id_slot] = _group(owner)

    def _note_named(self, group: CacheOwner, id_slot: int) -> None:
        if any(sent.id_slot is None for sent in self._sent.values()):
            self._named.pop(id_slot, None)
        else:
            self._named[id_slot] = group

    def has_only(self, owner: CacheOwner) -> bool:
        """Return whether all slots are known to hold tokens of one owner alone."""
        return self._only == _group(owner)

    def are_in_engine(self, owner: CacheOwner) -> bool:
        """Return whether requests of other owners are in the engine."""
        return any(other != _group(owner) for other in self._in_engine.values())

    def clear(self, owner: CacheOwner) -> None:
        """Note that all slots were cleared, for requests of one owner."""
        self._only = _group(owner)


def _may_meet(earlier: _Sent, own: _Sent) -> bool:
    """Return whether two requests could get the same slot, and the first reuse what is in it."""
    is_of_another = earlier.is_reusing and earlier.owner != own.owner
    return is_of_another and None in {earlier.id_slot, own.id_slot}


def _group(owner: CacheOwner) -> CacheOwner:
    """Return the owner of what a request leaves; those that share are one."""
    return owner if owner.is_alone else ANYONE
