"""Implements `corral slots list|save|forget`: conversations and learned prompts on disk."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from supervisor.cli.status import not_persisted_reasons
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import ForgottenSlots, SavedSlot
from supervisor.daemon.model_commands import follow, resolve_running, running_status
from supervisor.daemon.model_status import saved_slot
from supervisor.engine.prompts import LearnedPrompts
from supervisor.errors import NoSuchConversation, NotRunning, SettingsInvalid
from supervisor.output import CommandResult, size, table
from supervisor.settings.load import load
from supervisor.slot_store.manifest import find_conversation, find_file, turns_of
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.store_config import store_in
from supervisor.system.paths import directories


def list_slots() -> CommandResult:
    """List saved conversations by model, the latest used first; works without a daemon."""
    kept = sorted(
        store_in(directories(), load().settings.supervisor).list_saved(),
        key=attrgetter("used_at"),
        reverse=True,
    )
    found = [saved_slot(manifest) for manifest in sorted(kept, key=attrgetter("model"))]
    text = render(found) if found else "no saved conversations"
    encrypted = sum(slot.encrypted for slot in found)
    learned = LearnedPrompts(directories().prompts).counts()
    notes = (
        *([f"encrypted: {encrypted} of {len(found)}"] if encrypted else []),
        *(f"learned prompts of {model}: {count}" for model, count in learned.items()),
        *full_disk_notes(store_in(directories(), load().settings.supervisor)),
        *_not_persisted_notes(),
    )
    return CommandResult(found, text, notes)


def save(models: Sequence[str]) -> CommandResult:
    """Save the idle slots of running models, then list all saved conversations."""
    client = Client(directories().control_socket)
    names = resolve_running(models, client.status()) if models else []
    found = follow(client.save_slots(names))
    full = full_disk_notes(store_in(directories(), load().settings.supervisor))
    empty = "nothing was saved" if full else "no idle slot was worth saving"
    return CommandResult(found, render(found) if found else empty, (*full, *_not_persisted_notes()))


def full_disk_notes(store: SlotStore) -> list[str]:
    """Return the full limit, and the remedy, if nothing more can be saved."""
    try:
        rooms_bytes = store.rooms_bytes()
    except OSError:  # no directory yet
        return []
    return [
        f"{name} is full ({store.root}): conversations are saved again once there is more room; "
        "delete files, or saved conversations with corral slots forget MODEL"
        for name, room_bytes in rooms_bytes.items()
        if room_bytes <= 0
    ]


def _not_persisted_notes() -> list[str]:
    status = running_status()
    return not_persisted_reasons(status.models) if status else []


def render(found: Sequence[SavedSlot]) -> str:
    rows = [
        (slot.name, slot.model, slot.replica, slot.tokens, size(slot.size_bytes), slot.saved_at)
        for slot in found
    ]
    names = "NAME", "MODEL", "REPLICA", "TOKENS", "SIZE", "SAVED"
    if not any(slot.adapters for slot in found):
        return table(names, rows)
    adapted = [
        (*row, ", ".join(slot.adapters) or "none") for row, slot in zip(rows, found, strict=True)
    ]
    return table((*names, "ADAPTERS"), adapted)


def forget(
    model: str | None,
    *,
    everything: bool,
    conversation: str | None = None,
    request: str | None = None,
) -> CommandResult:
    """Delete conversations and learned prompts of a model or of all, or a single conversation.

    Works without a daemon, except for the conversation of a request.
    """
    if sum((model is not None, everything, conversation is not None, request is not None)) != 1:
        raise SettingsInvalid(
            "name a model, or give --all, --conversation or --request",
            hint="corral slots list shows them",
        )
    where = directories()
    notes = []
    try:
        found = Client(where.control_socket).forget_slots(model, conversation, request)
        if found.in_use:
            notes.append("a request in flight still belongs to it: forget it again afterwards")
    except NotRunning:
        found = _forget_on_disk(
            store_in(where, load().settings.supervisor), model, conversation, request
        )
        if conversation is not None and any(slot.encrypted for slot in found.slots):
            notes.append("it is encrypted: only a running daemon finds its other files")
    if conversation is None and request is None:
        learned = LearnedPrompts(where.prompts).forget(model)
        notes += [f"deleted learned prompts: {learned}"] if learned else []
    total_bytes, count = sum(slot.size_bytes for slot in found.slots), len(found.slots)
    text = f"deleted: {count} slot file{'' if count == 1 else 's'}, {size(total_bytes)}"
    text += f"; emptied slots: {found.emptied}" if found.emptied else ""
    return CommandResult(found.slots, text, tuple(notes))


def _forget_on_disk(
    store: SlotStore, model: str | None, conversation: str | None, request: str | None
) -> ForgottenSlots:
    if request is not None:
        raise NoSuchConversation(
            "only a running daemon knows the conversation of a request",
            hint="corral slots list shows the names of saved conversations",
        )
    if conversation is None:
        gone = store.forget(model)
    else:
        saved = store.list_saved()
        turns = turns_of(saved)
        name = find_file(turns, conversation)
        names = {name, *find_conversation(turns, turns[name])[0]}
        gone = [manifest for manifest in saved if manifest.name in names]
        store.forget_files(gone)
    return ForgottenSlots(
        slots=[saved_slot(manifest) for manifest in gone], emptied=0, in_use=False
    )
