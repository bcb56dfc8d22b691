"""Which slot of a process holds which conversation, as far as that can be seen from outside. Pure.

An engine that matches no prompts (`--slot-prompt-similarity 0`) takes the least recently used slot,
and looks for the conversation only among the copies saved when the last task began: a turn that
follows its answer at once is computed again. It uses the slot that still holds the conversation if
the request names that slot. On such an engine that is safe even if the slot is in use: the request
waits. (On an engine that matches prompts it is not.) For an API without `id_slot`, all other idle
slots are used once with an empty prompt, which leaves their content as it is; then the slot that
holds the conversation is the least recently used.

So the slots are tracked: a request that names none is expected in the least recently used slot, and
among unused slots in the last. If that is only a guess, or if a task without a lease (a probe, a
restart from saved slots, another client of an engine without a key) may have used slots, /slots is
read: it shows the order of the last tasks and the number of tokens in each slot, and we know the
order of our requests.

`SlotOwners` tracks whose tokens an engine can find for a request, for API keys that share no
caches. An engine reuses any prefix in a slot or its host cache. So a request of an owner that is
alone names its slot, in which alone the engine then looks, and has `cache_prompt: false` unless
that slot is known to hold only tokens of its owner: then nothing is reused, and afterwards the slot
holds only its owner's tokens. A request that names no slot can get any slot, and a copy of any.
That costs nothing while a process has computed prompts of only one owner.

Source: measured on build 10434; server-context.cpp of llama.cpp, get_available_slot. With
`cache_prompt: false`, `cache_n` is 0 in every API but Anthropic's, which ignores it, with any
content of slots and host cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from operator import attrgetter
from typing import Final, Protocol

from proxy.cache.fingerprint import RestoredSlot
from proxy.cache.holders import Conversation
from proxy.cache.host_cache import EMPTY, TOKENS_AWAY_MAX, HostCache, SlotContent
from proxy.cache.prompt import ANYONE, CacheOwner, Prompt, continues, shared_blocks
from proxy.upstream.engine_state import SlotState


class SentRequest(Protocol):
    """A request to an engine: a lease."""

    is_placed: bool  # Whether the engine is known to have given it a slot.


class SlotOwners:
    """Owners of the tokens in one process's slots."""

    def __init__(self, *, is_new: bool = True) -> None:
        self.has_shared = False  # Whether a request of an owner that shares caches was sent.
        self.has_alone = False  # Whether a request of an owner that is alone was sent.
        self._is_new = is_new
        self._alone = ANYONE  # the latest
        self._has_several = False
        self._by_slot: dict[int, CacheOwner] = {}
        # By requests that no unnamed one can have displaced.
        self._named: dict[int, CacheOwner] = {}
        # From before they are sent until the engine computes nothing more for them: owner, id_slot,
        # whether they reuse tokens.
        self._requests: dict[SentRequest, tuple[CacheOwner, int | None, bool]] = {}
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

    def begin(self, request: SentRequest, owner: CacheOwner, id_slot: int | None) -> bool:
        """Note that a request will be sent once `must_wait` is False; return whether it may reuse.

        The content of its slot is uncertain until it has ended.
        """
        self._requests.pop(request, None)
        if not (owner.is_alone or self.has_alone):
            self.has_shared = True
            self._requests[request] = ANYONE, id_slot, True
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
        self._requests[request] = group, id_slot, is_reusing
        return is_reusing

    def must_wait(self, request: SentRequest) -> bool:
        """Return whether a request must wait until earlier ones have their slots.

        Otherwise a request could get the slot of the other and reuse its tokens.
        """
        if not self.has_alone:
            return False
        own = self._requests.get(request)
        if own is None or request.is_placed:
            return False
        earlier = takewhile(lambda other: other[0] is not request, self._requests.items())
        return any(
            is_reusing and owner != own[0] and (id_slot is None or own[1] is None)
            for other, (owner, id_slot, is_reusing) in earlier
            if not other.is_placed
        )

    def note_release(self, request: SentRequest) -> None:
        """Note that a request has ended and the engine computes nothing more for it."""
        self._requests.pop(request, None)

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
        sent = self._requests.items()
        if any(sent_to is None and not request.is_placed for request, (_, sent_to, _) in sent):
            self._named.pop(id_slot, None)
        else:
            self._named[id_slot] = group

    def has_only(self, owner: CacheOwner) -> bool:
        return self._only == _group(owner)

    def are_in_engine(self, owner: CacheOwner) -> bool:
        return any(other != _group(owner) for other, _, _ in self._requests.values())

    def clear(self, owner: CacheOwner) -> None:
        self._only = _group(owner)


def _group(owner: CacheOwner) -> CacheOwner:
    """Return the owner of a request's tokens; all owners that share caches count as one."""
    return owner if owner.is_alone else ANYONE


# Other clients may use an idle engine's slots if it needs no key; then, after this time, our view
# is stale.
_FRESH_S: Final = 5.0
# Below this, recomputing is as fast as finding the prefix.
_WORTH_BLOCKS: Final = 4


# How sure the number of a slot is: only from the order of use; known when the slot was last used,
# but another client may have used it since; confirmed.
GUESSED, SEEN, CONFIRMED = range(3)


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a process; outsiders change it by methods only."""

    id_slot: int
    certainty: int = CONFIRMED
    content: SlotContent = EMPTY
    holder: object | None = None  # The request that has it; None: it is idle.
    is_sent: bool = False  # Whether that request was sent; it has not ended.
    # Content that its request will replace; None once that is sent, without a request, or if the
    # slot holds the request's conversation.
    previous: SlotContent | None = None
    # Whether the engine will take it for its request, even if that does not name it.
    is_aimed: bool = False
    started_tick: int = 0  # When a request was last sent to it, in the map's own count; 0 for never
    freed_tick: int = 0  # When it was last freed, in the same count; 0 for never.

    @property
    def conversation(self) -> Conversation | None:
        return self.content.conversation

    @property
    def is_idle(self) -> bool:
        return self.holder is None

    @property
    def is_reserved(self) -> bool:
        """Whether a request has the slot and is not sent yet."""
        return self.holder is not None and not self.is_sent

    @property
    def is_confirmed(self) -> bool:
        return self.certainty == CONFIRMED

    @property
    def in_engine(self) -> SlotContent:
        """The content until a request is sent."""
        return self.content if self.conversation else self.previous or self.content

    @property
    def is_unused(self) -> bool:
        """Whether it has no request, or one that will replace its content."""
        return self.holder is None or self.previous is not None

    def free(self, content: SlotContent) -> None:
        self.holder, self.previous, self.content = None, None, content
        self.is_sent = self.is_aimed = False

    def drop_previous(self) -> None:
        """Note that the content which its request would replace is overwritten now."""
        if self.is_reserved:
            self.previous = EMPTY

    def fill(self, conversation: Conversation | None, tokens: int, blocks: tuple[int, ...]) -> None:
        """Note that the slot was filled from a file, for the request that has it."""
        self.content = SlotContent(conversation, tokens, blocks, is_saved=True)
        self.is_aimed = self.is_reserved

    def note_saved(self, content: SlotContent) -> None:
        """Note that a file has this content, the current or the previous one."""
        if self.previous is content:
            self.previous = content._replace(is_saved=True)
        elif self.content == content:
            self.content = content._replace(is_saved=True)

    def verifies_restore(self, prompt: Prompt | None) -> bool:
        """Return whether the response to this prompt will show if the restored cache is used.

        True for the first request that names the slot and continues its last answered prompt.
        """
        if prompt is None or not self.content.blocks or self.content.task is None:
            return False
        return self.is_confirmed and continues(prompt.blocks, self.content.blocks)


class SlotMap:
    """The slots of one process; keeps the model of its `host_cache` up to date and searches it.

    Other clients may use the slots if it `is_shared`; without, only tasks that `note_task` reports.
    """

    def __init__(
        self,
        slots: int,
        host_cache: HostCache | None = None,
        *,
        is_empty: bool = True,
        is_shared: bool = True,
    ) -> None:
        self.owners = SlotOwners(is_new=is_empty)
        self.host_cache = host_cache
        # Conversations whose next turn is expected soon: others take their slots last.
        self._kept: set[Conversation] = set()
        self.uses = 0  # Changes when a slot is given to a request, used or freed.
        self._slots = [Slot(number) for number in range(slots)]
        self._is_shared = is_shared
        self._turn = count(1)
        self._seen_at_s = float("-inf")

    @property
    def tokens(self) -> int:
        return sum(slot.content.tokens for slot in self._slots if slot.conversation is not None)

    @property
    def conversations(self) -> int:
        return sum(slot.conversation is not None for slot in self._slots)

    def find(self, conversation: Conversation | None) -> Slot | None:
        held = (slot for slot in self._slots if slot.content.conversation is conversation)
        return next(held, None) if conversation else None

    def holds(self, conversation: Conversation) -> bool:
        """Return whether a slot or the host cache is believed to hold a conversation."""
        cache = self.host_cache
        is_copied = cache is not None and cache.is_trusted and cache.holds(conversation) > 0
        return self.find(conversation) is not None or is_copied

    @property
    def idle(self) -> list[Slot]:
        """The idle slots, in the order in which the engine takes them."""
        idle = [slot for slot in self._slots if slot.holder is None]
        if len(idle) > 1:  # the least recently used first; of unused ones, the last
            idle.sort(key=attrgetter("id_slot"), reverse=True)
            idle.sort(key=attrgetter("freed_tick"))
        return idle

    @property
    def pending(self) -> int:
        """Requests that have a slot and are not sent yet."""
        return sum(slot.is_reserved for slot in self._slots)

    def is_in_use(self, conversation: Conversation | None) -> bool:
        used = (slot.conversation for slot in self._slots if not slot.is_idle)
        return conversation is not None and any(other is conversation for other in used)

    def add_restored(self, filled: RestoredSlot, conversation: Conversation | None) -> None:
        """Note the content of a restored slot; call in the order of the slots' tasks."""
        for slot in self._slots:
            if slot.id_slot == filled.id_slot:
                blocks = filled.fingerprint.blocks
                slot.content = SlotContent(conversation, filled.tokens, blocks, filled.task)
                if filled.task >= 0:
                    slot.started_tick = slot.freed_tick = next(self._turn)

    # A request gets a slot.

    def reserve(
        self, holder: object, conversation: Conversation | None, now_s: float
    ) -> Slot | None:
        """Reserve the slot with the conversation, or else the slot that the engine would take.

        `conversation` is None if the request will name no slot. Returns None if no slot is known to
        be free.
        """
        if self._is_shared and now_s - self._seen_at_s > _FRESH_S:
            self.note_task()
        for slot in self._slots:
            if slot.content.task is not None:  # only the request that uses it confirms it
                slot.certainty = min(slot.certainty, SEEN)
        idle = self.idle
        for slot in idle if conversation else ():
            if slot.content.conversation is conversation:
                slot.holder, slot.is_aimed = holder, True
                self.uses += 1
                return slot
        if idle and self._kept:
            idle.sort(key=self._is_kept)
        return self._give(idle[0], holder) if idle else None

    def keep(self, conversation: Conversation) -> None:
        """Note that a conversation's next turn is expected soon, so others take its slot last."""
        self._kept.add(conversation)

    def end_keep(self, conversation: Conversation) -> None:
        self._kept.discard(conversation)

    def is_kept_before(self, slot: Slot) -> bool:
        """Return whether the engine would take a kept slot before this one."""
        return bool(self._kept) and any(
            self._is_kept(other) and other.freed_tick < slot.freed_tick for other in self.idle
        )

    def _is_kept(self, slot: Slot) -> bool:
        return slot.conversation in self._kept

    def note_task(self) -> None:
        """Note that the engine may have given any idle slot to a task without a lease."""
        for slot in self._slots:
            # Tokens of others in a slot we never used belong to no conversation.
            if slot.started_tick and slot.holder is None:
                slot.certainty = min(slot.certainty, SEEN)

    def rebind(self, slot: Slot, conversation: Conversation | None, now_s: float) -> Slot | None:
        """Reserve again, for a slot that is not the conversation's."""
        return self.reserve(self._take_back(slot), conversation, now_s)

    def reserve_lru(self, slot: Slot) -> Slot:
        """Give a new conversation the least recently used confirmed slot, if there is one."""
        holder = self._take_back(slot)
        idle = sorted(self.idle, key=self._is_kept)
        return self._give(next((other for other in idle if other.is_confirmed), slot), holder)

    def _give(self, slot: Slot, holder: object) -> Slot:
        slot.holder, slot.previous, slot.content = holder, slot.content, EMPTY
        self.uses += 1
        return slot

    def _take_back(self, slot: Slot) -> object:
        """Take the slot from a request that did not use it; return that request's lease."""
        holder = slot.holder
        slot.free(slot.in_engine)
        self.uses += 1
        return holder

    def has_unsaved(self, slot: Slot) -> bool:
        """Return whether another idle slot was freed after the engine's last task began.

        The engine cannot find its new tokens for other slots, because it searches only the copies
        from then.
        """
        begun = max(other.started_tick for other in self._slots)
        return any(
            other.freed_tick > begun for other in self._slots if other.is_idle and other is not slot
        )

    def mark_refreshed(self, slot: Slot) -> list[Slot]:
        """Note that all other slots without a request are used at once; return them.

        Then the engine takes this slot next.
        """
        now = next(self._turn)
        self.uses += 1
        if self.host_cache:
            self._note_copied(None, self.host_cache)
        others = [other for other in self._slots if other.is_unused and other is not slot]
        for other in others:
            other.started_tick = other.freed_tick = now
            other.content = other.content._replace(task=None)
        slot.is_aimed = slot.is_reserved
        return others

    def mark_copied(self, number: int) -> None:
        """Note that an unnamed empty task got this slot: the engine copies all idle slots."""
        now = next(self._turn)
        self.uses += 1
        taken = [slot for slot in self._slots if slot.id_slot == number and slot.is_unused]
        if self.host_cache:
            self.host_cache.note_copies(slot.in_engine for slot in taken)
            self._note_copied(None, self.host_cache)
        for slot in taken:
            slot.started_tick = slot.freed_tick = now
            slot.content = slot.content._replace(task=None)

    def confirm(self, slot: Slot, number: int) -> None:
        """Note the number of a slot, as the engine reported it."""
        for other in self._slots:
            if other.id_slot == number and other is not slot:
                other.id_slot, other.certainty = slot.id_slot, GUESSED
        slot.id_slot, slot.certainty = number, CONFIRMED

    def mark_sent(
        self,
        slot: Slot,
        *,
        is_named: bool,
        conversation: Conversation | None = None,
        blocks: Sequence[int] = (),
    ) -> None:
        """Note that the request which has a slot is sent now.

        If it does not name the slot, the engine may give it another one, and also searches the host
        cache for its prompt, of which `conversation` and `blocks` are given.
        """
        if self.host_cache and not is_named:
            self.host_cache.note_slot_taken(slot.in_engine, conversation, blocks)
        if is_named:
            slot.certainty = CONFIRMED
        elif not (slot.is_aimed and slot.certainty == CONFIRMED):
            slot.certainty = GUESSED
        self.mark_used(slot)

    def mark_used(self, slot: Slot) -> None:
        """Note that the engine begins a task in a slot, by a request that has it."""
        if self.host_cache:
            self._note_copied(slot, self.host_cache)
        slot.started_tick = next(self._turn)
        slot.content = slot.content._replace(task=None, is_saved=False)
        slot.is_sent, slot.is_aimed, slot.previous = True, False, None
        self.uses += 1

    def _note_copied(self, slot: Slot | None, host_cache: HostCache) -> None:
        """Note that a task begins in a slot: the engine copies all other idle slots."""
        idle = [other for other in self._slots if other.is_unused and other is not slot]
        idle.sort(key=attrgetter("id_slot"))
        host_cache.note_copies(other.in_engine for other in idle)

    def release(self, holder: object, now_s: float) -> None:
        """Note that a request has ended; the content of its slot is now unknown if it was sent."""
        for slot in self._slots:
            if slot.holder is not holder:
                continue
            if slot.is_sent:
                slot.free(EMPTY)
                slot.freed_tick, self._seen_at_s = next(self._turn), now_s
                self.uses += 1
            else:
                self._take_back(slot)

    def set_conversation(
        self, slot: Slot, conversation: Conversation, tokens: int, blocks: tuple[int, ...] = ()
    ) -> None:
        """Note the content of a slot after a response, unless the next request already uses it."""
        if slot.holder is None:
            for other in self._slots:
                if other.content.conversation is conversation:
                    other.content = EMPTY
            slot.content = SlotContent(conversation, tokens, blocks)

    def forget(self, conversation: Conversation) -> int | None:
        for slot in self._slots:
            if slot.is_idle and slot.conversation is conversation:
                slot.content = EMPTY
                return slot.id_slot
        return None

    # The tokens that the engine would find.

    def is_lost_if_named(self, slot: Slot) -> bool:
        """Return whether naming this slot loses the only copy of its previous content."""
        previous = slot.previous
        if self.host_cache is None or previous is None or previous.conversation is None:
            return False
        if previous.conversation.is_paused:  # a file is found by whole blocks, a copy by tokens
            return True
        has_copy = self.host_cache.holds(previous.conversation) >= previous.tokens
        return not (previous.is_saved or has_copy)

    def find_held(
        self, slot: Slot, conversation: Conversation | None, blocks: Sequence[int]
    ) -> SlotContent:
        """Return the content from which a request without a named slot would continue."""
        if self.host_cache and self.host_cache.is_trusted:
            return self.host_cache.search(slot.in_engine, conversation, blocks)
        return slot.in_engine

    def held_blocks_max(self, blocks: Sequence[int]) -> int:
        """Return the most blocks of a prompt that an idle slot or the host cache holds."""
        held = [
            shared_blocks(slot.in_engine.blocks, blocks) for slot in self._slots if slot.is_unused
        ]
        if self.host_cache and self.host_cache.is_trusted:
            held.append(shared_blocks(self.host_cache.search(EMPTY, None, blocks).blocks, blocks))
        return max(held, default=0)

    def is_elsewhere(
        self, slot: Slot, conversation: Conversation | None, blocks: Sequence[int]
    ) -> bool:
        """Return whether the engine would find many more blocks of a prompt than this slot has."""
        own = shared_blocks(slot.in_engine.blocks, blocks)
        found = shared_blocks(self.find_held(slot, conversation, blocks).blocks, blocks)
        return found - own >= _WORTH_BLOCKS

    def note_return(self, conversation: Conversation | None) -> None:
        if self.host_cache and conversation and not self.is_in_use(conversation):
            self.host_cache.note_return(conversation)

    # The slots that the engine lists.

    def idle_conversations(self, listed: Sequence[SlotState], now_s: float) -> dict[int, Slot]:
        """Return the idle slots with a conversation and a sure number, by number."""
        self.sync(listed, None, now_s)
        idle = (slot for slot in self._slots if slot.is_idle and slot.is_confirmed)
        return {slot.id_slot: slot for slot in idle if slot.conversation is not None}

    def sync(self, listed: Sequence[SlotState], pending: Slot | None, now_s: float) -> None:
        """Learn numbers and lost contents from the engine's current /slots; see `match_slots`."""
        self._seen_at_s = now_s
        found = match_slots(self._slots, listed, pending)
        for slot in self._slots:
            if slot in found:
                slot.id_slot, slot.certainty, slot.content = found[slot]
            elif slot.certainty == SEEN:  # an engine that does not list it does not contradict us
                slot.certainty = CONFIRMED


def match_slots(
    slots: Sequence[Slot], listed: Sequence[SlotState], pending: Slot | None = None
) -> dict[Slot, tuple[int, int, SlotContent]]:
    """Return number, certainty and content of tracked slots, from the list of an engine's slots.

    1. A slot of known number keeps it if a request uses it, or if that slot has the same content.
    2. Other slots match tasks by recency, latest first, if their content is equal or unknown.
    3. Of slots used at once an equal one matches; an older equal one too: those after it are lost.
    4. A task that matches none is not ours; lost slots get such numbers as guesses, and no content.
       If there is one slot, its number is certain, unless another client uses it now.

    Requests that are sent at once may begin in another order, so their numbers stay. `pending` is
    the slot of a request that is not sent yet.
    """
    states = {state.id_slot: state for state in listed}
    contents = {
        slot: EMPTY if _is_overwritten(slot, slots, states) else slot.content for slot in slots
    }
    found: dict[Slot, tuple[int, int, SlotContent]] = {}
    for slot in slots:
        state = states.get(slot.id_slot)
        if state is None or slot.certainty == GUESSED:
            continue
        if slot.is_sent or _holds(slot, contents[slot], state):
            found[slot] = slot.id_slot, CONFIRMED, contents[slot]
    kept = {number for number, _, _ in found.values()}
    rest = sorted(
        (slot for slot in slots if slot not in found), key=attrgetter("started_tick"), reverse=True
    )
    lost: list[Slot] = []
    foreign: list[int] = []
    for state in sorted(listed, key=attrgetter("task"), reverse=True):
        if state.id_slot in kept:
            continue
        matched = _match(rest, state, contents, pending)
        if matched is None:
            foreign.append(state.id_slot)
            continue
        found[matched] = state.id_slot, CONFIRMED, contents[matched]
        rest.remove(matched)
        while rest and rest[0].started_tick > matched.started_tick:
            lost.append(rest.pop(0))
    guesses = zip((*lost, *rest), foreign, strict=False)
    is_only = len(slots) == len(listed) == 1 and not listed[0].is_busy
    certainty = CONFIRMED if is_only else GUESSED
    return found | {slot: (number, certainty, EMPTY) for slot, number in guesses}


def _match(
    rest: Sequence[Slot],
    state: SlotState,
    contents: Mapping[Slot, SlotContent],
    pending: Slot | None,
) -> Slot | None:
    """Return which of the slots, latest first, has had a task; None: none of them."""
    equal = [slot for slot in rest if _holds(slot, contents[slot], state)]
    latest: list[Slot] = []
    for slot in rest:
        is_open = contents[slot].conversation is None or not (slot.is_idle or slot is pending)
        is_equally_new = (slot.started_tick == 0) == (state.task < 0)
        if slot.started_tick == rest[0].started_tick and is_equally_new:
            latest += [slot] if is_open or slot in equal else []
    both = (slot for slot in latest if slot in equal)
    return next(iter((*both, *latest, *equal)), None)


def _is_overwritten(slot: Slot, slots: Sequence[Slot], listed: Mapping[int, SlotState]) -> bool:
    """Return whether the order of the tasks shows that an unnamed request got this slot.

    Each request that was sent after this slot was freed should have ended in another slot with a
    later task. If fewer slots have later tasks, one of these requests ended here.
    """
    state = listed.get(slot.id_slot)
    if state is None or slot.certainty == GUESSED or slot.conversation is None:
        return False
    if slot.content.task is not None or slot.is_sent:
        return False
    ended = sum(
        slot.freed_tick < other.started_tick < other.freed_tick
        and other.conversation is not None
        and other.content.task is None
        for other in slots
    )
    return sum(other.task > state.task for other in listed.values()) < ended


def _holds(slot: Slot, content: SlotContent, state: SlotState) -> bool:
    """Return whether an engine's slot has as many tokens as this content."""
    is_idle = content.conversation is not None and not state.is_busy
    if content.task is not None:  # the engine does not report the size of a restored slot
        return is_idle and (slot.id_slot, content.task) == (state.id_slot, state.task)
    return is_idle and 0 <= content.tokens - state.tokens <= TOKENS_AWAY_MAX
