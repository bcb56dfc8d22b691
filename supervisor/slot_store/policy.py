"""Which conversations are saved and restored, and which files are redundant. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.upstream.engine_state import SlotState
from supervisor.builds.help import has_draft_cache
from supervisor.plan.plan import Plan
from supervisor.slot_store.file_index import CataloguedFile, is_prefix
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.slot_file import SlotFileHeader

# The engine's default. Source: --help of build 10434.
_SIMILARITY: Final = 0.1


# `slots_disk_budget = "auto"`. The rest of the room stays free for other programs.
_AUTO_SHARE: Final = 0.25
_AUTO_MIN_BYTES: Final = 1024**3
_AUTO_MAX_BYTES: Final = 256 * 1024**3


def auto_budget_bytes(free_bytes: int, used_bytes: int) -> int:
    """Return the budget for a file system with this free room and the slot files in it.

    A file that is saved or deleted does not change the budget, as the sum of both stays the same.
    """
    room_bytes = round(_AUTO_SHARE * (free_bytes + used_bytes))
    return min(_AUTO_MAX_BYTES, max(_AUTO_MIN_BYTES, room_bytes))


@dataclass(frozen=True, slots=True)
class DiskBudget:
    size_bytes: int  # of the moment if `is_auto`; see `SlotPersistence.budget`
    model_share: float = 0.75  # the most of size_bytes for one model
    # The manifest of a file takes some 10 kB of memory.
    files: int = 2048
    files_a_model: int = 1536
    tokens_min: int = 256  # a shorter conversation is prefilled as quickly
    max_age: timedelta = timedelta(days=30)  # since the latest use
    write_hour_bytes: int = 32 * 1024**3  # per hour, while engines serve
    is_auto: bool = False

    @property
    def model_bytes(self) -> int:
        return int(self.model_share * self.size_bytes)


def worth_saving(
    slots: Iterable[SlotState],
    known: Mapping[int, int | None],
    budget: DiskBudget,
    token_bytes: float,
    room_bytes: int,
    key: CacheKey,
) -> list[SlotState]:
    """Return the slots to save, the most recently used first.

    `known` is each slot's latest task when it was last saved, `token_bytes` the size of a token in
    a file. An engine uses no restored slot that is shorter than the model's sliding window.
    """
    left_bytes: float = min(room_bytes, budget.model_bytes)
    chosen = []
    for slot in sorted(slots, key=lambda slot: -slot.task):
        is_saved = slot.id_slot in known and known[slot.id_slot] == slot.task
        is_short = slot.tokens < budget.tokens_min or slot.tokens <= key.window
        if is_saved or slot.is_busy or is_short:
            continue
        size_bytes = slot.tokens * token_bytes + (key.state_bytes or 0)
        if size_bytes <= left_bytes:
            left_bytes -= size_bytes
            chosen.append(slot)
    return chosen


def is_redundant(
    new: SlotFileHeader,
    used_at: datetime,
    others: Mapping[Manifest, SlotFileHeader],
    tokens_min: int,
) -> tuple[bool, list[Manifest]]:
    """Return whether the others make a new file redundant, and which others it makes redundant.

    Of two files that differ by less than `tokens_min`, the one used last stays. The turns of a
    conversation may differ in tokens, as a response is tokenized again as part of the next prompt.
    """
    evicted = []
    for manifest, held in others.items():
        shared = new.shared_with(held)
        is_newer = used_at >= manifest.used_at
        if is_newer and len(held.tokens) - shared < tokens_min:
            evicted.append(manifest)
        elif len(new.tokens) == shared or (not is_newer and len(new.tokens) - shared < tokens_min):
            return True, []
    return False, evicted


def to_restore(
    kept: Iterable[CataloguedFile],
    cache_key: str,
    *,
    replica: tuple[int, int],
    most: int,
    ctx: int,
    is_elsewhere: Callable[[ConversationFingerprint], bool] = lambda _: False,
) -> list[CataloguedFile]:
    """Return at most `most` files to restore, of fewer than `ctx` tokens each.

    `replica` is the number of the replica and the number of replicas: each restores its own files
    and a share of those of removed replicas, except conversations that are elsewhere. Then come the
    prefixes of all replicas, then unidentified files, mostly of probes.
    """
    number, replicas = replica
    fitting = [
        entry
        for entry in kept
        if entry.file.cache_key == cache_key
        and (entry.manifest.replica % replicas == number or is_prefix(entry.file))
        and entry.file.tokens < ctx
        and not is_elsewhere(entry.file.fingerprint)
    ]
    fitting.sort(
        key=lambda entry: (
            bool(entry.file.fingerprint.turn_hashes),
            is_prefix(entry.file),
            entry.manifest.used_at,
        ),
        reverse=True,
    )
    return fitting[:most]


def fill_order(slots: Sequence[SlotState]) -> list[int]:
    """Return the ids of slots in the order in which to fill them.

    An engine that does not match prompts gives a new request the least recently used slot; among
    slots that were never used, that with the highest id. So the slot filled first is reused last.

    Source: measured on build 10434; llama.cpp, get_available_slot.
    """
    return [slot.id_slot for slot in sorted(slots, key=lambda slot: (slot.task < 0, slot.id_slot))]


def unsupported_reason(plan: Plan) -> str | None:
    """Return why no slot of a plan is saved, as a clause; None if they are.

    Other kinds of models are tried once: the store's `outcomes` have the result.
    """
    if plan.engine.flags.find("slot-save-path") is None:
        return "this build cannot save slots"
    chosen = plan.memory_inputs.chosen
    if chosen.get("embedding") or chosen.get("rerank"):
        return "it serves no conversations"
    has_host_cache = chosen.get("cache-ram") != 0
    # No file has the cache of the draft model. Without it, the engine responds with 500 to a
    # conversation that it finds in cache-ram (build 10434).
    if has_host_cache and has_draft_cache(chosen):
        return "the cache of its draft model is not saved; with cache-ram = 0 it need not be"
    finds_slot = plan.slots == 1 or plan.has_own_slots or uses_prompt_similarity(plan)
    if not (has_host_cache or finds_slot):
        return "with several slots and cache-ram = 0 a conversation does not get its slot again"
    return None


def uses_prompt_similarity(plan: Plan) -> bool:
    """Return whether the engine gives a request the slot with the longest common prefix."""
    return float(plan.memory_inputs.chosen.get("slot-prompt-similarity", _SIMILARITY)) > 0
