"""Which slot of a process holds which conversation, as far as that can be seen from outside. Pure.

An engine that matches no prompts (`--slot-prompt-similarity 0`) takes the least recently used slot,
and looks for the conversation only among the copies saved when the last task began: a turn that
follows its answer at once is computed again. It uses the slot that still holds the conversation if
the request names that slot. On such an engine that is safe even if the slot is in use: the request
waits. (On an engine that matches prompts it is not.) For an API without `id_slot`, all other idle
slots are used once with an empty prompt, which leaves their content as it is; then the slot that
holds the conversation is the least recently used.

So the slots are tracked: a request that names none is expected in the least recently used slot, and
among unused slots in the last. If that is only a guess, or if other clients (a probe, a restart
from saved slots) may have used slots, /slots is read: it shows the order of the last tasks and the
number of tokens in each slot, and we know the order of our requests.

`SlotOwners` tracks whose tokens an engine can find for a request, for API keys that share no
caches. An engine reuses any prefix in a slot or its host cache. So a request of an owner that is
alone names its slot, in which alone the engine then looks, and has `cache_prompt: false` unless
that slot is known to hold only tokens of its owner: then nothing is reused, and afterwards the slot
holds only its owner's tokens. A request that names no slot can get any slot, and a copy of any.
That costs nothing while a process has computed prompts of only one owner.

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
    """A request whose slot is uncertain: from before it is sent until the engine reports it."""

    owner: CacheOwner
    id_slot: int | None
    is_reusing: bool


@cache
def _shared(id_slot: int | None) -> _Sent:
    """Return a cached `_Sent` of an owner that shares caches, as nearly all do; slots are few."""
    return _Sent(ANYONE, id_slot, is_reusing=True)


class SlotOwners:
    """Owners of the tokens in one process's slots. A holder is a lease.

    Attributes:
        has_shared: Whether a request of an owner that shares caches was sent.
        has_alone: Whether a request of an owner that is alone was sent.
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
        """Return whether a request may reuse cached tokens; `id_slot`: None if it names none."""
        if not self.has_others(owner):
            return True
        return id_slot is not None and self._by_slot.get(id_slot) == _group(owner)

    def begin(self, holder: object, owner: CacheOwner, id_slot: int | None) -> bool:
        """Note that a request will be sent once `must_wait` is False; return whether it may reuse.

        The content of its slot is uncertain until it has ended.
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

    def must_wait(self, holder: object) -> bool:
        """Return whether a request must wait until earlier ones have their slots.

        Otherwise one of them could get the other's slot and reuse its tokens.
        """
        if not self.has_alone:
            return False
        own = self._sent.get(holder)
        if own is None:
            return False
        for earlier in takewhile(lambda other: other is not holder, self._sent):
            other = self._sent[earlier]
            may_meet = None in {other.id_slot, own.id_slot}
            if may_meet and other.is_reusing and other.owner != own.owner:
                return True
        return False

    def note_placed(self, holder: object) -> None:
        self._sent.pop(holder, None)

    def note_release(self, holder: object) -> None:
        """Note that a request has ended and the engine computes nothing more for it."""
        self._sent.pop(holder, None)
        self._in_engine.pop(holder, None)

    def fill(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that a slot was filled with an owner's tokens; its request is sent next."""
        if id_slot is not None:
            self._note_named(_group(owner), id_slot)
            self.end(owner, id_slot)

    def end(self, owner: CacheOwner, id_slot: int | None) -> None:
        """Note that the engine has answered a request that named its slot.

        The slot holds only its owner's tokens, unless another request may have taken it.
        """
        if id_slot is not None and self._named.pop(id_slot, None) == _group(owner):
            self._by_slot[id_slot] = _group(owner)

    def _note_named(self, group: CacheOwner, id_slot: int) -> None:
        if any(sent.id_slot is None for sent in self._sent.values()):
            self._named.pop(id_slot, None)
        else:
            self._named[id_slot] = group

    def has_only(self, owner: CacheOwner) -> bool:
        return self._only == _group(owner)

    def are_in_engine(self, owner: CacheOwner) -> bool:
        return any(other != _group(owner) for other in self._in_engine.values())

    def clear(self, owner: CacheOwner) -> None:
        self._only = _group(owner)


def _group(owner: CacheOwner) -> CacheOwner:
    """Return the owner of a request's tokens; all owners that share caches count as one."""
    return owner if owner.is_alone else ANYONE


# Other clients may use an idle engine's slots; after this time our view is stale.
_FRESH_S: Final = 5.0
# Below this, recomputing is as fast as finding the prefix.
_WORTH_BLOCKS: Final = 4
# The last token of an answer is not in the cache, nor is the one that ends it.
_TOKENS_AWAY_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class SlotContent:
    """The content of a slot; for the attributes see `TrackedSlot`."""

    conversation: object | None
    tokens: int
    blocks: tuple[int, ...]
    task: int | None
    is_saved: bool


EMPTY: Final = SlotContent(None, 0, (), None, is_saved=False)


@dataclass(slots=True, eq=False)
class TrackedSlot:
    """One slot and its believed content.

    Its phases: unused (`started_tick` is 0); idle (no holder); reserved (a holder, and
    `started_tick <= freed_tick`: its request is not sent yet, and `before` has the content that it
    will replace); busy (a holder, and `started_tick > freed_tick`).

    Attributes:
        conversation: None if it will not be continued.
        task: For a restored slot that was not used since: number of its last task; while it is
            unchanged, so is the content. None otherwise.
        is_saved: Whether a file has all of the content.
        is_confirmed: Whether `id_slot` is known, and not only guessed from the order of use.
        is_numbered: Whether `id_slot` was confirmed at the last use; another client may have used
            the slot since.
        is_aimed: Whether the engine will take this slot even if its request does not name it.
        before: Content before a request of another conversation got the slot; None once it is sent.
        started_tick: When a request was last sent to it, in the map's own count; 0 for never.
        freed_tick: When it was last freed, in the same count; 0 for never.
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
    started_tick: int = 0
    freed_tick: int = 0

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
        self.before, self.is_aimed = self.content, False
        self.empty()
        self.holder = holder

    def empty_before(self) -> None:
        self.before = EMPTY

    def fill(self, conversation: object | None, tokens: int, blocks: tuple[int, ...]) -> None:
        self.content = SlotContent(conversation, tokens, blocks, None, is_saved=True)
        self.is_aimed = True

    def note_saved(self, content: SlotContent) -> None:
        """Note that a file has this content, current or from before its holder got it."""
        if self.before is content:
            self.before = replace(content, is_saved=True)
        elif self.content == content:
            self.is_saved = True

    def take_back(self) -> object | None:
        """Take the slot from a request that did not use it; return that request's lease."""
        holder, self.holder = self.holder, None
        if self.conversation is None and self.before is not None:
            self.content = self.before
        self.before = None
        return holder

    def verifies_restore(self, prompt: Prompt | None) -> bool:
        """Return whether the response to this prompt will show if the restored cache is used.

        True for the first request that names the slot and continues its last answered prompt.
        """
        ours, its = self.blocks, prompt.blocks if prompt else ()
        goes_on = 0 < len(ours) <= len(its) and its[len(ours) - 1] == ours[-1]
        return self.is_confirmed and self.task is not None and goes_on


class Search(NamedTuple):
    """The prompt that an engine searches its host cache for."""

    conversation: object | None = None
    blocks: Sequence[int] = ()


class SlotMap:
    """The slots of one process; keeps the model of its `host_cache` up to date and searches it."""

    def __init__(
        self, slots: int, host_cache: HostCache | None = None, *, is_empty: bool = True
    ) -> None:
        self.owners = SlotOwners(is_new=is_empty)
        self.host_cache = host_cache
        self._slots = [TrackedSlot(number, is_confirmed=True) for number in range(slots)]
        self._turn = count(1)
        self._seen_at_s = float("-inf")

    @property
    def tokens(self) -> int:
        return sum(tracked.tokens for tracked in self._slots if tracked.conversation is not None)

    @property
    def conversations(self) -> int:
        return sum(tracked.conversation is not None for tracked in self._slots)

    def slot_of(self, conversation: object) -> int | None:
        idle = (slot for slot in self._slots if slot.holder is None)
        return next((slot.id_slot for slot in idle if slot.conversation is conversation), None)

    def content_of(self, conversation: object) -> SlotContent | None:
        held = (slot.content for slot in self._slots if slot.conversation is conversation)
        return next(held, None)

    def holds(self, conversation: object) -> bool:
        """Return whether a slot or the host cache is believed to hold a conversation."""
        is_in_slot = any(slot.conversation is conversation for slot in self._slots)
        return is_in_slot or self.is_copied(conversation)

    @property
    def idle_slots(self) -> list[int]:
        """Ids of the idle slots, in the order in which the engine takes them."""
        idle = [slot for slot in self._slots if slot.holder is None]
        return [slot.id_slot for slot in sorted(idle, key=_age)]

    @property
    def unsaved_idle(self) -> list[TrackedSlot]:
        """Idle slots whose conversations are in no file, in the order the engine takes them."""
        idle = (slot for slot in self._slots if slot.holder is None and not slot.is_saved)
        return sorted((slot for slot in idle if slot.conversation is not None), key=_age)

    @property
    def uses(self) -> list[tuple[object, int, int]]:
        """A value that changes when a slot is given to a request, used or freed."""
        return [(slot.holder, slot.started_tick, slot.freed_tick) for slot in self._slots]

    @property
    def is_pending(self) -> bool:
        """Whether a request has a slot and is not sent yet."""
        return any(
            slot.holder is not None and slot.started_tick <= slot.freed_tick for slot in self._slots
        )

    def add_restored(self, filled: RestoredSlot, conversation: object | None) -> None:
        """Note the content of a restored slot; call in the order of the slots' tasks."""
        for tracked in self._slots:
            if tracked.id_slot == filled.id_slot:
                tracked.conversation, tracked.tokens = conversation, filled.tokens
                tracked.blocks, tracked.task = filled.fingerprint.blocks, filled.task
                if filled.task >= 0:
                    tracked.started_tick = tracked.freed_tick = next(self._turn)

    def is_in_use(self, conversation: object | None) -> bool:
        used = (slot.conversation for slot in self._slots if slot.holder is not None)
        return conversation is not None and any(other is conversation for other in used)

    def reserve(
        self, holder: object, conversation: object | None, now_s: float
    ) -> TrackedSlot | None:
        """Reserve the slot with the conversation, or else the one that the engine would take.

        `conversation` is None if the request will name no slot. Returns None if no slot is known to
        be free.
        """
        is_stale = now_s - self._seen_at_s > _FRESH_S
        for slot in self._slots:
            # Only the request that uses a restored slot confirms it. Tokens that other clients put
            # into a slot we never used belong to no conversation.
            if (is_stale and slot.started_tick and slot.holder is None) or slot.task is not None:
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
        return self.reserve(tracked.take_back(), conversation, now_s)

    def reserve_lru(self, tracked: TrackedSlot) -> TrackedSlot:
        """Give a new conversation the least recently used confirmed slot, if there is one."""
        holder = tracked.take_back()
        certain = (slot for slot in self._slots if slot.is_confirmed and slot.holder is None)
        chosen = min(certain, key=_age, default=tracked)
        chosen.give(holder)
        return chosen

    def has_unsaved(self, tracked: TrackedSlot) -> bool:
        """Return whether another idle slot was freed after the engine's last task began.

        The engine cannot find its new tokens for other slots, because it searches only the copies
        from then.
        """
        begun = max(slot.started_tick for slot in self._slots)
        idle = (slot for slot in self._slots if slot.holder is None and slot is not tracked)
        return any(slot.freed_tick > begun for slot in idle)

    def mark_refreshed(self, tracked: TrackedSlot) -> list[int]:
        """Note that all other slots without a request are used at once; return their ids."""
        now = next(self._turn)
        self._note_copied(None)
        others = [slot for slot in self._slots if _is_unsent(slot) and slot is not tracked]
        for slot in others:
            slot.started_tick = slot.freed_tick = now
            slot.task = None
        return [slot.id_slot for slot in others]

    def is_copied(self, conversation: object | None) -> bool:
        host_cache = self.host_cache
        return bool(host_cache and host_cache.is_trusted and host_cache.holds(conversation))

    def is_lost_if_named(self, tracked: TrackedSlot) -> bool:
        """Return whether naming this slot loses the only copy of its previous content."""
        before = tracked.before
        if self.host_cache is None or before is None or before.conversation is None:
            return False
        return not (before.is_saved or self.host_cache.holds(before.conversation))

    def found_blocks(
        self, tracked: TrackedSlot, conversation: object | None, blocks: Sequence[int]
    ) -> int:
        """Return the blocks of a prompt that a request without a named slot would find."""
        held: Held = _content_before_use(tracked)
        if self.host_cache and self.host_cache.is_trusted:
            held = self.host_cache.search(held, conversation, blocks)
        return shared_blocks(held.blocks, blocks)

    def held_blocks(self, tracked: TrackedSlot, blocks: Sequence[int]) -> int:
        return shared_blocks(_content_before_use(tracked).blocks, blocks)

    def held_blocks_max(self, blocks: Sequence[int]) -> int:
        """Return the most blocks of a prompt that an idle slot or the host cache holds."""
        held: list[Held] = [_content_before_use(slot) for slot in self._slots if _is_unsent(slot)]
        if self.host_cache and self.host_cache.is_trusted:
            held.append(self.host_cache.search(EMPTY, None, blocks))
        return max((shared_blocks(content.blocks, blocks) for content in held), default=0)

    def is_elsewhere(
        self, tracked: TrackedSlot, conversation: object | None, blocks: Sequence[int]
    ) -> bool:
        """Return whether the engine would find many more blocks of a prompt than this slot has."""
        own = self.held_blocks(tracked, blocks)
        return self.found_blocks(tracked, conversation, blocks) - own >= _WORTH_BLOCKS

    def note_return(self, conversation: object | None) -> None:
        if self.host_cache and conversation and not self.is_in_use(conversation):
            self.host_cache.note_return(conversation)

    def note_found(self, conversation: object, cached_tokens: int) -> None:
        if self.host_cache:
            self.host_cache.note_found(conversation, cached_tokens)

    def mark_sent(self, tracked: TrackedSlot, search: Search | None = None) -> None:
        """Note that a request is sent now; with `search` if it names no slot.

        In that case the engine may give it another slot, and also searches the host cache for its
        prompt.
        """
        if search and self.host_cache:
            self.host_cache.note_slot_taken(
                _content_before_use(tracked), search.conversation, search.blocks
            )
        self._note_copied(tracked)
        tracked.started_tick, tracked.task = next(self._turn), None
        tracked.is_confirmed = tracked.is_confirmed and (search is None or tracked.is_aimed)
        tracked.is_numbered = tracked.is_confirmed
        tracked.before, tracked.is_saved = None, False

    def _note_copied(self, tracked: TrackedSlot | None) -> None:
        """Note that a task begins in a slot: the engine copies all other idle slots."""
        if self.host_cache:
            idle = [slot for slot in self._slots if _is_unsent(slot) and slot is not tracked]
            idle.sort(key=_id_slot)
            self.host_cache.note_copies(map(_content_before_use, idle))

    def release(self, holder: object, now_s: float) -> None:
        """Note that a request has ended; the content of its slot is now unknown."""
        for tracked in self._slots:
            if tracked.holder is not holder:
                continue
            if tracked.before is not None:  # it was not sent
                tracked.take_back()
                continue
            tracked.holder, tracked.freed_tick = None, next(self._turn)
            tracked.empty()
            self._seen_at_s = now_s

    def set_conversation(
        self, tracked: TrackedSlot, conversation: object, tokens: int, blocks: tuple[int, ...] = ()
    ) -> None:
        """Note the content of a slot after a response, unless the next request already uses it."""
        if tracked.holder is None:
            for other in self._slots:
                if other.conversation is conversation:
                    other.empty()
            tracked.conversation, tracked.tokens, tracked.blocks = conversation, tokens, blocks

    def forget(self, conversation: object) -> int | None:
        """Forget the idle slot that holds a conversation; return its id."""
        for tracked in self._slots:
            if tracked.holder is None and tracked.conversation is conversation:
                tracked.empty()
                return tracked.id_slot
        return None

    def idle_conversations(
        self, listed: Sequence[SlotState], now_s: float
    ) -> dict[int, TrackedSlot]:
        self.sync(listed, None, now_s)
        idle = (slot for slot in self._slots if slot.holder is None and slot.is_confirmed)
        return {slot.id_slot: slot for slot in idle if slot.conversation is not None}

    def sync(self, listed: Sequence[SlotState], pending: TrackedSlot | None, now_s: float) -> None:
        """Match the tracked slots with the slots that the engine reports, to learn their ids.

        A known id stays if the slot still has the same content, or if a request uses it: two
        requests that are sent at once may begin in another order. The content has changed if the
        slot's last task is later than that of a request that was sent after the slot's own request
        had ended, even with the same number of tokens. The other slots are matched by recency, the
        latest first on both sides; slots used at the same time are interchangeable. A task that is
        not ours is ignored, and a conversation that matches no slot is in none any more.

        Args:
            listed: The engine's current /slots.
            pending: The slot of a request that is not sent yet, or None.
            now_s: Monotonic time.
        """
        self._seen_at_s = now_s
        states = {state.id_slot: state for state in listed}
        for tracked in [slot for slot in self._slots if self._is_overwritten(slot, states)]:
            tracked.empty()
        known = {slot.id_slot for slot in self._slots if _is_known(slot, states.get(slot.id_slot))}
        rest = [slot for slot in self._slots if slot.id_slot not in known]
        rest.sort(key=lambda slot: slot.started_tick, reverse=True)
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
            while rest and rest[0].started_tick > tracked.started_tick:
                lost.append(rest.pop(0))
        for tracked, slot in zip((*lost, *rest), unknown, strict=False):
            tracked.empty()
            tracked.id_slot, tracked.is_numbered = slot, False
        for tracked in self._slots:
            tracked.is_confirmed = tracked.is_numbered

    def _is_overwritten(self, tracked: TrackedSlot, states: Mapping[int, SlotState]) -> bool:
        """Return whether the order of the tasks shows that an unnamed request got this slot.

        Each request that was sent after this slot was freed should have ended in another slot with
        a later task. If fewer slots have later tasks, one of these requests ended here.
        """
        seen = states.get(tracked.id_slot)
        if seen is None or not (tracked.is_numbered and tracked.conversation is not None):
            return False
        if tracked.task is not None or tracked.started_tick > tracked.freed_tick:
            return False
        sent_later = [
            slot for slot in self._slots if tracked.freed_tick < slot.started_tick < slot.freed_tick
        ]
        ended = sum(slot.conversation is not None and slot.task is None for slot in sent_later)
        return sum(state.task > seen.task for state in states.values()) < ended


def _is_known(tracked: TrackedSlot, seen: SlotState | None) -> bool:
    if seen is None or not tracked.is_numbered:
        return False
    is_sent = tracked.holder is not None and tracked.started_tick > tracked.freed_tick
    return is_sent or _holds(tracked, seen)


def _is_unsent(tracked: TrackedSlot) -> bool:
    """Return whether no request was sent to a slot since its last one ended."""
    return tracked.holder is None or tracked.before is not None


def _content_before_use(tracked: TrackedSlot) -> TrackedSlot | SlotContent:
    """Return the content of a slot to which no request was sent yet."""
    return tracked if tracked.before is None or tracked.conversation else tracked.before


_id_slot = attrgetter("id_slot")


def _age(tracked: TrackedSlot) -> tuple[int, int]:
    """Sort key of the order in which engines take slots: least recently used; unused, the last."""
    return tracked.freed_tick, -tracked.id_slot


def _place(
    slot_map: Sequence[TrackedSlot], seen: SlotState, pending: TrackedSlot | None
) -> int | None:
    """Return the index of the tracked slot that `seen` describes, or None.

    Certain matches win; slots used at the same time are interchangeable.
    """
    certain = [at for at, slot in enumerate(slot_map) if _holds(slot, seen)]
    first = [
        at for at, slot in enumerate(slot_map) if slot.started_tick == slot_map[0].started_tick
    ]
    possible = [at for at in first if _may_match(slot_map[at], seen, pending)]
    return next(iter((*(at for at in certain if at in possible), *possible, *certain)), None)


def _may_match(tracked: TrackedSlot, seen: SlotState, pending: TrackedSlot | None) -> bool:
    if (tracked.started_tick == 0) != (seen.task < 0):
        return False
    is_open = tracked.conversation is None or (
        tracked.holder is not None and tracked is not pending
    )
    return is_open or _holds(tracked, seen)


def _holds(tracked: TrackedSlot, seen: SlotState) -> bool:
    is_idle = tracked.conversation is not None and not seen.is_busy
    if tracked.task is not None:  # the engine does not report the size of a restored slot
        return is_idle and (tracked.id_slot, tracked.task) == (seen.id_slot, seen.task)
    return is_idle and 0 <= tracked.tokens - seen.tokens <= _TOKENS_AWAY_MAX
