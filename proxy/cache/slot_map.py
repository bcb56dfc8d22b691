"""Which slot of a process holds which conversation, as far as that can be known from outside. Pure.

An engine that matches no prompts (`--slot-prompt-similarity 0`) takes the slot used longest ago,
and looks for the conversation only among those saved when the last task began: a turn that follows
its answer at once is computed again. It uses the slot that still holds its conversation if the
request names that slot. On such an engine that is safe even where the slot is in use: the request
waits. (On one that matches prompts it is not.) For an API without `id_slot`, all other idle slots
are used once more, with an empty prompt, which leaves what they hold as it is; then the slot that
holds the conversation is the one used longest ago.

So the slots are tracked: a request that names none is expected in the slot used longest ago, and of
unused ones in the last. Where that is only a guess, or others (a probe, a restart from saved slots)
may have used them, /slots is read: it shows the order of the last tasks and how many tokens each
slot holds, and we know the order of our requests.

`SlotOwners`: whose tokens an engine can find for a request, where keys share no caches. An engine
reuses whatever a slot or its host cache has of a prompt. So a request of an owner that is alone
names its slot, in which the engine then looks alone, and says `cache_prompt: false` unless that
slot is known to hold only tokens of its owner: then nothing is reused, and what the slot holds
afterwards is its owner's. A request that names no slot can get each, and a copy of any. That costs
nothing as long as a process has computed prompts of one owner alone.

Source: measured on build 10434; server-context.cpp of llama.cpp, get_available_slot. With
`cache_prompt: false` `cache_n` is 0 in every API but Anthropic's, which ignores it, whatever slots
and the host cache hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, takewhile
from operator import attrgetter
from typing import Final, NamedTuple

from proxy.cache.fingerprint import RestoredSlot
from proxy.cache.host_cache import Held, HostCache
from proxy.cache.prompt import ANYONE, CacheOwner, Prompt, shared_blocks
from proxy.upstream.engine_state import SlotState


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


# What others do to the slots of an idle engine they do after a while.
_FRESH_S: Final = 5.0
# Fewer are computed as quickly as they are found.
_WORTH_BLOCKS: Final = 4
# The last token of an answer is not in the cache, nor is the one that ends it.
_TOKENS_AWAY_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class SlotContent:
    """What a slot holds; the attributes are those of `TrackedSlot`."""

    conversation: object | None
    tokens: int
    blocks: tuple[int, ...]
    task: int | None
    is_saved: bool


EMPTY: Final = SlotContent(None, 0, (), None, is_saved=False)


@dataclass(slots=True, eq=False)
class TrackedSlot:
    """One slot, and what it is believed to hold.

    Attributes:
        conversation: None for one that will not be continued.
        tokens: Of that conversation.
        blocks: Of its last answered prompt.
        task: Of a restored slot that was not used since, the number of its last task: while that
            stays so, it holds the same. None for all others.
        is_saved: Whether a file has all that it holds.
        is_confirmed: Whether the number is known, and not only guessed from the order of use.
        is_numbered: Whether it was when the slot was last used, which others may have used since.
        is_aimed: Whether the engine will take it for its request, which need not name it.
        before: What it held when a request of another conversation got it; None once that is sent.
        holder: The lease that uses it, or None.
        started: When a request was last sent to it, in a count of its own; 0 for never.
        freed: When it was last freed, in a count of its own; 0 for never.
    """

    id_slot: int
    conversation: object | None = None
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    task: int | None = None
    is_saved: bool = False
    is_confirmed: bool = False
    is_numbered: bool = False
    is_aimed: bool = False
    before: SlotContent | None = None
    holder: object | None = None
    started: int = 0
    freed: int = 0

    @property
    def content(self) -> SlotContent:
        return SlotContent(
            self.conversation, self.tokens, self.blocks, self.task, is_saved=self.is_saved
        )

    @content.setter
    def content(self, held: SlotContent) -> None:
        self.conversation, self.tokens, self.blocks = held.conversation, held.tokens, held.blocks
        self.task, self.is_saved = held.task, held.is_saved

    def empty(self) -> None:
        self.content = EMPTY

    def give(self, holder: object) -> None:
        """Give it to a request of another conversation than it holds."""
        self.before, self.is_aimed = self.content, False
        self.empty()
        self.holder = holder

    def empty_before(self) -> None:
        """Note that what it held before is lost."""
        self.before = EMPTY

    def fill(self, conversation: object | None, tokens: int, blocks: tuple[int, ...]) -> None:
        """Note that it holds what a file has."""
        self.content = SlotContent(conversation, tokens, blocks, None, is_saved=True)
        self.is_aimed = True

    def note_saved(self, content: SlotContent) -> None:
        """Note that a file has what it holds, or held before its holder got it."""
        if self.before is content:
            self.before = replace(content, is_saved=True)
        elif self.content == content:
            self.is_saved = True

    def take_back(self) -> object | None:
        """Take it from a request that did not use it; return that."""
        holder, self.holder = self.holder, None
        if self.conversation is None and self.before is not None:
            self.content = self.before
        self.before = None
        return holder

    def verifies_restore(self, prompt: Prompt | None) -> bool:
        """Return whether the response to a prompt shows whether the restored cache is used.

        So it is for the first request that names the slot and continues its last answered prompt.
        """
        ours, its = self.blocks, prompt.blocks if prompt else ()
        goes_on = 0 < len(ours) <= len(its) and its[len(ours) - 1] == ours[-1]
        return self.is_confirmed and self.task is not None and goes_on


class Search(NamedTuple):
    """What an engine looks for in its host cache."""

    conversation: object | None = None
    blocks: Sequence[int] = ()


class SlotMap:
    """The slots of one process; `host_cache` is told what is copied there, and searched.

    Attributes:
        owners: Whose tokens they hold.
    """

    def __init__(self, slots: int, host_cache: HostCache | None = None) -> None:
        self.owners = SlotOwners()
        self._slots = [TrackedSlot(number, is_confirmed=True) for number in range(slots)]
        self._host_cache = host_cache
        self._turn = count(1)
        self._seen_at_s = float("-inf")

    @property
    def tokens(self) -> int:
        """Tokens of conversations that they hold, as far as known."""
        return sum(tracked.tokens for tracked in self._slots if tracked.conversation is not None)

    @property
    def conversations(self) -> int:
        """How many slots hold a conversation, as far as known."""
        return sum(tracked.conversation is not None for tracked in self._slots)

    def slot_of(self, conversation: object) -> int | None:
        """Return the number of the idle slot that holds a conversation, as far as known."""
        idle = (slot for slot in self._slots if slot.holder is None)
        return next((slot.id_slot for slot in idle if slot.conversation is conversation), None)

    def content_of(self, conversation: object) -> SlotContent | None:
        """Return what the slot holds that has a conversation, idle or not, as far as known."""
        held = (slot.content for slot in self._slots if slot.conversation is conversation)
        return next(held, None)

    def holds(self, conversation: object) -> bool:
        """Return whether a slot holds a conversation, idle or not, as far as known."""
        return any(slot.conversation is conversation for slot in self._slots)

    @property
    def idle_slots(self) -> list[int]:
        """The numbers of the idle slots, in the order in which the engine takes them."""
        idle = [slot for slot in self._slots if slot.holder is None]
        return [slot.id_slot for slot in sorted(idle, key=_age)]

    @property
    def unsaved_idle(self) -> list[TrackedSlot]:
        """Idle slots whose conversations are in no file, in the order the engine takes them."""
        idle = (slot for slot in self._slots if slot.holder is None and not slot.is_saved)
        return sorted((slot for slot in idle if slot.conversation is not None), key=_age)

    @property
    def uses(self) -> list[tuple[object, int, int]]:
        """Differs as soon as a slot is given to a request, used or freed."""
        return [(slot.holder, slot.started, slot.freed) for slot in self._slots]

    @property
    def is_pending(self) -> bool:
        """Whether a request has a slot and is not sent yet."""
        return any(slot.holder is not None and slot.started <= slot.freed for slot in self._slots)

    def add_restored(self, filled: RestoredSlot, conversation: object | None) -> None:
        """Note what a slot holds as the process begins; call in the order of their tasks."""
        for tracked in self._slots:
            if tracked.id_slot == filled.id_slot:
                tracked.conversation, tracked.tokens = conversation, filled.tokens
                tracked.blocks, tracked.task = filled.fingerprint.blocks, filled.task
                if filled.task >= 0:
                    tracked.started = tracked.freed = next(self._turn)

    def is_in_use(self, conversation: object | None) -> bool:
        """Return whether a request uses the slot that holds a conversation."""
        used = (slot.conversation for slot in self._slots if slot.holder is not None)
        return conversation is not None and any(other is conversation for other in used)

    def reserve(
        self, holder: object, conversation: object | None, now_s: float
    ) -> TrackedSlot | None:
        """Give a request the slot that holds its conversation, else the one the engine would take.

        `conversation` is None where no slot is to be named. Returns None where no slot is known to
        be free.
        """
        is_stale = now_s - self._seen_at_s > _FRESH_S
        for slot in self._slots:
            # A restored slot is confirmed only by the request that uses it. What others put into
            # one that was never used belongs to no conversation.
            if (is_stale and slot.started and slot.holder is None) or slot.task is not None:
                slot.is_confirmed = False
        idle = [tracked for tracked in self._slots if tracked.holder is None]
        tracked = next(
            (
                slot
                for slot in idle
                if conversation is not None and slot.conversation is conversation
            ),
            None,
        )
        if tracked is None and idle:
            tracked = min(idle, key=_age)
            tracked.give(holder)
        elif tracked:
            tracked.holder, tracked.is_aimed = holder, True
        return tracked

    def rebind(
        self, tracked: TrackedSlot, conversation: object, now_s: float
    ) -> TrackedSlot | None:
        """Give a request another slot: the one it has does not hold its conversation."""
        return self.reserve(tracked.take_back(), conversation, now_s)

    def reserve_lru(self, tracked: TrackedSlot) -> TrackedSlot:
        """Give a new conversation the confirmed slot used longest ago, if there is one."""
        holder = tracked.take_back()
        certain = (slot for slot in self._slots if slot.is_confirmed and slot.holder is None)
        chosen = min(certain, key=_age, default=tracked)
        chosen.give(holder)
        return chosen

    def has_unsaved(self, tracked: TrackedSlot) -> bool:
        """Return whether another idle slot holds tokens from after the engine's last task began.

        The engine does not copy those to other slots: it looks among what it saved then.
        """
        begun = max(slot.started for slot in self._slots)
        idle = (slot for slot in self._slots if slot.holder is None and slot is not tracked)
        return any(slot.freed > begun for slot in idle)

    def mark_refreshed(self, tracked: TrackedSlot) -> list[int]:
        """Note that all other slots without a request are used at once; return their numbers."""
        now = next(self._turn)
        self._note_copied(None)
        others = [slot for slot in self._slots if _is_unsent(slot) and slot is not tracked]
        for slot in others:
            slot.started = slot.freed = now
            slot.task = None
        return [slot.id_slot for slot in others]

    def is_copied(self, conversation: object | None) -> bool:
        """Return whether the host cache holds a conversation, as far as known."""
        host_cache = self._host_cache
        return bool(host_cache and host_cache.is_trusted and host_cache.holds(conversation))

    def is_lost_if_named(self, tracked: TrackedSlot) -> bool:
        """Return whether what a slot held is nowhere else, and the engine would copy it."""
        before = tracked.before
        if self._host_cache is None or before is None or before.conversation is None:
            return False
        return not (before.is_saved or self._host_cache.holds(before.conversation))

    def found_blocks(
        self, tracked: TrackedSlot, conversation: object | None, blocks: Sequence[int]
    ) -> int:
        """Return how much of a prompt the engine would find for a request that names no slot."""
        return shared_blocks(self._search(tracked, conversation, blocks).blocks, blocks)

    def held_blocks(self, tracked: TrackedSlot, blocks: Sequence[int]) -> int:
        """Return how much of a prompt a slot holds."""
        return shared_blocks(_content_before_use(tracked).blocks, blocks)

    def held_blocks_max(self, blocks: Sequence[int]) -> int:
        """Return how much of a prompt an idle slot or the host cache holds."""
        held: list[Held] = [_content_before_use(slot) for slot in self._slots if _is_unsent(slot)]
        if self._host_cache and self._host_cache.is_trusted:
            held.append(self._host_cache.search(EMPTY, None, blocks))
        return max((shared_blocks(content.blocks, blocks) for content in held), default=0)

    def is_elsewhere(
        self, tracked: TrackedSlot, conversation: object | None, blocks: Sequence[int]
    ) -> bool:
        """Return whether the engine would find much more of a prompt than this slot holds."""
        own = self.held_blocks(tracked, blocks)
        return self.found_blocks(tracked, conversation, blocks) - own >= _WORTH_BLOCKS

    def _search(
        self, tracked: TrackedSlot, conversation: object | None, blocks: Sequence[int]
    ) -> Held:
        held = _content_before_use(tracked)
        if self._host_cache and self._host_cache.is_trusted:
            return self._host_cache.search(held, conversation, blocks)
        return held

    def note_return(self, conversation: object | None) -> None:
        """Note that a conversation comes that is in no idle slot."""
        if self._host_cache and conversation and not self.is_in_use(conversation):
            self._host_cache.returned(conversation)

    def note_found(self, conversation: object, cached_tokens: int) -> None:
        """Note how many tokens of a conversation's prompt the engine found."""
        if self._host_cache:
            self._host_cache.found(conversation, cached_tokens)

    def mark_sent(self, tracked: TrackedSlot, search: Search | None = None) -> None:
        """Note that a request is sent now; with `search` where it names no slot.

        The engine may give it another slot then, and looks for its prompt in the host cache too.
        """
        if search and self._host_cache:
            self._host_cache.taken(_content_before_use(tracked), search.conversation, search.blocks)
        self._note_copied(tracked)
        tracked.started, tracked.task = next(self._turn), None
        tracked.is_confirmed = tracked.is_confirmed and (search is None or tracked.is_aimed)
        tracked.is_numbered = tracked.is_confirmed
        tracked.before, tracked.is_saved = None, False

    def _note_copied(self, tracked: TrackedSlot | None) -> None:
        """Note that a task begins in a slot: the engine copies what all others hold."""
        if self._host_cache:
            idle = [slot for slot in self._slots if _is_unsent(slot) and slot is not tracked]
            idle.sort(key=_id_slot)
            self._host_cache.slots_copied(map(_content_before_use, idle))

    def release(self, holder: object, now_s: float) -> None:
        """Note that a request is over; what its slot holds is not known any more."""
        for tracked in self._slots:
            if tracked.holder is not holder:
                continue
            if tracked.before is not None:  # it was not sent
                tracked.take_back()
                continue
            tracked.holder, tracked.freed = None, next(self._turn)
            tracked.empty()
            self._seen_at_s = now_s

    def set_conversation(
        self, tracked: TrackedSlot, conversation: object, tokens: int, blocks: tuple[int, ...] = ()
    ) -> None:
        """Note what a slot holds after a response, unless the next request uses it already."""
        if tracked.holder is None:
            for other in self._slots:
                if other.conversation is conversation:
                    other.empty()
            tracked.conversation, tracked.tokens, tracked.blocks = conversation, tokens, blocks

    def forget(self, conversation: object) -> int | None:
        """Forget what an idle slot holds of a conversation; return the number of that slot."""
        for tracked in self._slots:
            if tracked.holder is None and tracked.conversation is conversation:
                tracked.empty()
                return tracked.id_slot
        return None

    def idle_conversations(
        self, listed: Sequence[SlotState], now_s: float
    ) -> dict[int, TrackedSlot]:
        """Return the idle slots that are known to hold a conversation, by number."""
        self.sync(listed, None, now_s)
        idle = (slot for slot in self._slots if slot.holder is None and slot.is_confirmed)
        return {slot.id_slot: slot for slot in idle if slot.conversation is not None}

    def sync(self, listed: Sequence[SlotState], pending: TrackedSlot | None, now_s: float) -> None:
        """Find each slot's number by what the engine reports of all of them.

        A number that was known stays, if the slot still holds the same or a request uses it: two
        requests that are sent at once may begin in another order. It holds something else if its
        last task is later than that of a request that was sent after its own had ended, also where
        that has as many tokens. Of the others, the latest come first on both sides; those used at
        once come in any order. A task that is not ours is not tracked, and a conversation that
        nothing fits is in no slot any more.

        Args:
            listed: What the engine reports.
            pending: The slot of a request that is not sent yet, or None.
            now_s: Monotonic time.
        """
        self._seen_at_s = now_s
        states = {state.id_slot: state for state in listed}
        for tracked in [slot for slot in self._slots if self._is_overwritten(slot, states)]:
            tracked.empty()
        known = {slot.id_slot for slot in self._slots if _is_known(slot, states.get(slot.id_slot))}
        rest = [slot for slot in self._slots if slot.id_slot not in known]
        rest.sort(key=lambda slot: slot.started, reverse=True)
        lost: list[TrackedSlot] = []
        unknown: list[int] = []
        open_states = (state for state in listed if state.id_slot not in known)
        for seen in sorted(open_states, key=lambda state: state.task, reverse=True):
            at = _place(rest, seen, pending)
            if at is None:
                unknown.append(seen.id_slot)
                continue
            tracked = rest.pop(at)
            tracked.id_slot, tracked.is_numbered = seen.id_slot, True
            while rest and rest[0].started > tracked.started:
                lost.append(rest.pop(0))
        for tracked, slot in zip((*lost, *rest), unknown, strict=False):
            tracked.empty()
            tracked.id_slot, tracked.is_numbered = slot, False
        for tracked in self._slots:
            tracked.is_confirmed = tracked.is_numbered

    def _is_overwritten(self, tracked: TrackedSlot, states: Mapping[int, SlotState]) -> bool:
        """Return whether a request that named no slot got this one, by the order of the tasks.

        Each request that was sent after this slot was freed has ended in another slot, with a later
        task: fewer slots with later tasks show that one of them ended here.
        """
        seen = states.get(tracked.id_slot)
        if seen is None or not (tracked.is_numbered and tracked.conversation is not None):
            return False
        if tracked.task is not None or tracked.started > tracked.freed:
            return False
        sent_later = [slot for slot in self._slots if tracked.freed < slot.started < slot.freed]
        ended = sum(slot.conversation is not None and slot.task is None for slot in sent_later)
        return sum(state.task > seen.task for state in states.values()) < ended


def _is_known(tracked: TrackedSlot, seen: SlotState | None) -> bool:
    """Return whether a slot is still the one that the engine lists by its number."""
    if seen is None or not tracked.is_numbered:
        return False
    is_sent = tracked.holder is not None and tracked.started > tracked.freed
    return is_sent or _holds(tracked, seen)


def _is_unsent(tracked: TrackedSlot) -> bool:
    """Return whether no request was sent to a slot since its last one ended."""
    return tracked.holder is None or tracked.before is not None


def _content_before_use(tracked: TrackedSlot) -> TrackedSlot | SlotContent:
    """Return what a slot holds to which no request was sent yet."""
    return tracked if tracked.before is None or tracked.conversation else tracked.before


_id_slot = attrgetter("id_slot")


def _age(tracked: TrackedSlot) -> tuple[int, int]:
    """Sort slots as engines take them: used longest ago, of unused ones the last."""
    return tracked.freed, -tracked.id_slot


def _place(
    slot_map: Sequence[TrackedSlot], seen: SlotState, pending: TrackedSlot | None
) -> int | None:
    """Return which tracked slot is one that the engine lists: the first, or one that surely is.

    Of those that were used at once, each may be the first.
    """
    certain = [at for at, slot in enumerate(slot_map) if _holds(slot, seen)]
    first = [at for at, slot in enumerate(slot_map) if slot.started == slot_map[0].started]
    possible = [at for at in first if _may_match(slot_map[at], seen, pending)]
    return next(iter((*(at for at in certain if at in possible), *possible, *certain)), None)


def _may_match(tracked: TrackedSlot, seen: SlotState, pending: TrackedSlot | None) -> bool:
    if (tracked.started == 0) != (seen.task < 0):
        return False
    is_open = tracked.conversation is None or (
        tracked.holder is not None and tracked is not pending
    )
    return is_open or _holds(tracked, seen)


def _holds(tracked: TrackedSlot, seen: SlotState) -> bool:
    is_idle = tracked.conversation is not None and not seen.is_busy
    if tracked.task is not None:  # nor does it tell how much it was filled with
        return is_idle and (tracked.id_slot, tracked.task) == (seen.id_slot, seen.task)
    return is_idle and 0 <= tracked.tokens - seen.tokens <= _TOKENS_AWAY_MAX
