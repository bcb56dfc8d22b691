"""What is worth saving, what is put back where, and what must leave the disk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter

from proxy.upstream.slots import SlotState
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.slot_file import SlotFileHeader


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """How much is kept.

    Attributes:
        size_bytes: Of all files together.
        model_share: The part of it that one model may take, 0 to 1.
        files: How many files.
        files_a_model: How many of one model.
        tokens_min: A shorter conversation is read anew as quickly.
    """

    size_bytes: int
    model_share: float = 0.75
    files: int = 256
    files_a_model: int = 64
    tokens_min: int = 256


def worth_saving(
    slots: Iterable[SlotState],
    known: Mapping[int, int | None],
    budget: DiskBudget,
    token_bytes: float,
    room_bytes: int,
) -> list[SlotState]:
    """Return the slots to save, the most recently used first.

    Args:
        slots: As the engine tells of them.
        known: Of the slots whose content is saved already, the request that was the latest then.
        budget: How much is kept.
        token_bytes: What a token takes in a file.
        room_bytes: What may be written, the free disk considered. Those that follow one that has no
            room may still have.
    """
    left_bytes = min(room_bytes, budget.model_share * budget.size_bytes)
    chosen = []
    for slot in sorted(slots, key=lambda slot: -slot.task):
        is_saved = slot.id_slot in known and known[slot.id_slot] == slot.task
        if is_saved or slot.is_busy or slot.tokens < budget.tokens_min:
            continue
        if slot.tokens * token_bytes <= left_bytes:
            left_bytes -= slot.tokens * token_bytes
            chosen.append(slot)
    return chosen


def is_redundant(
    new: SlotFileHeader,
    used_at: datetime,
    others: Mapping[Manifest, SlotFileHeader],
    tokens_min: int,
) -> tuple[bool, list[Manifest]]:
    """Return whether a file adds nothing to those there are, and which of them it makes so.

    Of two that differ by less than is worth saving, the one used last stays: turns of one
    conversation need not be equal token by token, for an answer is read anew as part of the next
    prompt, and its text may be cut into other tokens than it was made of.

    Args:
        new: The head of the file.
        used_at: When its conversation was used.
        others: Those of the same identity.
        tokens_min: A shorter conversation is not worth saving.
    """
    leaving = []
    for one, held in others.items():
        shared = new.shared_with(held)
        is_newer = used_at >= one.used_at
        if is_newer and len(held.tokens) - shared < tokens_min:
            leaving.append(one)
        elif len(new.tokens) == shared or (not is_newer and len(new.tokens) - shared < tokens_min):
            return True, []
    return False, leaving


def to_restore(
    kept: Iterable[Manifest], identity: CacheKey, *, replica: tuple[int, int], most: int, ctx: int
) -> list[Manifest]:
    """Return what to put back: what the proxy knew first, of that the most recently used.

    What it did not know is mostly no conversation: a prompt that was read ahead, or a probe.

    Args:
        kept: All that is kept of the model.
        identity: What they must belong to.
        replica: The number of the replica, and how many there are: each takes up what it saved, and
            what those saved that are no more is dealt out.
        most: How many slots there are.
        ctx: Tokens that a slot has room for; one must be left for the answer.
    """
    number, replicas = replica
    fitting = [
        one
        for one in kept
        if one.identity == identity and one.replica % replicas == number and one.tokens < ctx
    ]
    return sorted(fitting, key=lambda one: (bool(one.fingerprint), one.used_at), reverse=True)[
        :most
    ]


def fill_order(slots: Sequence[SlotState]) -> list[int]:
    """Return the ids of slots in the order in which they are filled.

    An engine that does not match prompts gives a new request the slot that is unused for longest,
    among those never used the one of the highest id. So the slot that was used comes first, then
    the lowest ids: who is filled first is given away last.

    Source: measured on build 10434; llama.cpp, get_available_slot.
    """
    return [slot.id_slot for slot in sorted(slots, key=lambda one: (one.task < 0, one.id_slot))]


def to_evict(kept: Collection[Manifest], budget: DiskBudget) -> list[Manifest]:
    """Return what must leave so that the rest is within the budget, least recently used first."""
    by_model = sorted(kept, key=attrgetter("model"))
    fitting = [
        one
        for _, group in groupby(by_model, key=attrgetter("model"))
        for one in _newest(
            list(group), budget.files_a_model, budget.model_share * budget.size_bytes
        )
    ]
    names = {one.name for one in _newest(fitting, budget.files, budget.size_bytes)}
    leaving = [one for one in kept if one.name not in names]
    return sorted(leaving, key=attrgetter("used_at"))


def _newest(kept: list[Manifest], files: int, size_bytes: float) -> list[Manifest]:
    """Return the most recently used that fit; the first that does not ends the list."""
    chosen: list[Manifest] = []
    for one in sorted(kept, key=attrgetter("used_at"), reverse=True):
        size_bytes -= one.size_bytes
        if size_bytes < 0 or len(chosen) == files:
            break
        chosen.append(one)
    return chosen
