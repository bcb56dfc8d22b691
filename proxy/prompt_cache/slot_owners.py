"""Whose tokens an engine can find for a request, where keys share no caches. Pure.

An engine reuses whatever a slot or its host cache has of a prompt. So a request of an owner that is
alone names its slot, in which the engine then looks alone, and says `cache_prompt: false` unless
that slot is known to hold only tokens of its owner: then nothing is reused, and what the slot holds
afterwards is its owner's. A request that names no slot can get each, and a copy of any.

That costs nothing as long as a process has computed prompts of one owner alone.

Source: measured on build 10434: with `cache_prompt: false` `cache_n` is 0 in every API but
Anthropic's, which ignores it, whatever slots and the host cache hold.
"""

from __future__ import annotations

from proxy.prompt_cache.prompt import ANYONE, CacheOwner


class SlotOwners:
    """Of one process; `is_new`: its slots were empty when it began.

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

    def begin(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that a request is sent; what its slot holds is not certain until it has ended."""
        if owner.is_alone:
            self._has_several = self._has_several or (self.has_alone and self._alone != owner)
            self._alone, self.has_alone = owner, True
        else:
            self.has_shared = True
        if id_slot is None:
            self._by_slot.clear()
        elif self._by_slot.get(id_slot) != _group(owner):
            self._by_slot.pop(id_slot, None)

    def end(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that a slot holds only tokens of an owner: the engine has told what it computed."""
        if id_slot is not None:
            self._by_slot[id_slot] = _group(owner)


def _group(owner: CacheOwner) -> CacheOwner:
    """Return the owner of what a request leaves; those that share are one."""
    return owner if owner.is_alone else ANYONE
