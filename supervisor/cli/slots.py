"""`corral slots list|save|forget`: conversations and learned prompts on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from supervisor.cli.status import not_persisted_reasons
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import ForgetRequest, ForgottenSlots, SavedSlot
from supervisor.daemon.model_commands import last_message, resolve_running
from supervisor.daemon.model_status import saved_slot
from supervisor.engine.prompts import LearnedPrompts
from supervisor.errors import DaemonBusy, NoSuchConversation, NotRunning, SettingsInvalid
from supervisor.output import CommandResult, size, table
from supervisor.slot_store.manifest import find_conversation, find_file, turns_of
from supervisor.slot_store.store import SlotStore
from supervisor.slot_store.store_config import store_in
from supervisor.system.paths import directories


def list_slots() -> CommandResult:
    """List saved conversations by model, the last used first; works without a daemon."""
    kept = sorted(
        store_in(directories()).list_saved(), key=lambda manifest: manifest.used_at, reverse=True
    )
    found = [saved_slot(manifest) for manifest in sorted(kept, key=lambda manifest: manifest.model)]
    text = render(found) if found else "no saved conversations"
    return CommandResult(
        found, text, (*_encryption_notes(found), *_learned_prompt_notes(), *_not_persisted())
    )


def save(words: Sequence[str]) -> CommandResult:
    """Save the idle slots of running models, and list what is saved then."""
    client = Client(directories().control_socket)
    names = resolve_running(words, client.status()) if words else []
    found = last_message(client.save_slots(names))["slots"]
    text = render(found) if found else "no idle slot was worth saving"
    return CommandResult(found, text, tuple(_not_persisted()))


def _not_persisted() -> list[str]:
    try:
        return not_persisted_reasons(Client(directories().control_socket).status()["models"])
    except (NotRunning, DaemonBusy):
        return []


def _encryption_notes(found: Sequence[SavedSlot]) -> list[str]:
    count = sum(slot["encrypted"] for slot in found)
    return [f"encrypted: {count} of {len(found)}"] if count else []


def _learned_prompt_notes() -> list[str]:
    counts = LearnedPrompts(directories().prompts).counts()
    return [f"learned prompts of {model}: {count}" for model, count in counts.items()]


def render(found: Sequence[SavedSlot]) -> str:
    rows = [
        (
            slot["name"],
            slot["model"],
            str(slot["replica"]),
            str(slot["tokens"]),
            size(slot["size_bytes"]),
            slot["saved_at"],
        )
        for slot in found
    ]
    return table(("NAME", "MODEL", "REPLICA", "TOKENS", "SIZE", "SAVED"), rows)


def forget(
    model: str | None,
    *,
    everything: bool,
    conversation: str | None = None,
    request: str | None = None,
) -> CommandResult:
    """Delete conversations of a model or of all with learned prompts, or a single conversation.

    Works without a daemon, but for the conversation of a request.
    """
    if sum((model is not None, everything, conversation is not None, request is not None)) != 1:
        raise SettingsInvalid(
            "name a model, or give --all, --conversation or --request",
            hint="corral slots list shows them",
        )
    where = directories()
    asked: ForgetRequest = {"model": model, "conversation": conversation, "request": request}
    try:
        found = Client(where.control_socket).forget_slots(asked)
        notes = list(_kept_notes(found))
    except NotRunning:
        found = _forget_on_disk(store_in(where), asked)
        notes = list(_left_notes(found, asked))
    if conversation is None and request is None:
        learned = LearnedPrompts(where.prompts).forget(model)
        notes += [f"deleted learned prompts: {learned}"] if learned else []
    return CommandResult(found["slots"], _forgotten_text(found), tuple(notes))


def _forget_on_disk(store: SlotStore, asked: ForgetRequest) -> ForgottenSlots:
    if asked["request"] is not None:
        raise NoSuchConversation(
            "only a running daemon knows the conversation of a request",
            hint="corral slots list has the names of those that are saved",
        )
    if asked["conversation"] is None:
        gone = store.forget(asked["model"])
    else:
        saved = store.list_saved()
        turns = turns_of(saved)
        name = find_file(turns, asked["conversation"])
        names = {name, *find_conversation(turns, turns[name])[0]}
        gone = [manifest for manifest in saved if manifest.name in names]
        store.forget_files(gone)
    return {"slots": [saved_slot(manifest) for manifest in gone], "emptied": 0, "in_use": False}


def _forgotten_text(found: ForgottenSlots) -> str:
    total_bytes = sum(slot["size_bytes"] for slot in found["slots"])
    count = len(found["slots"])
    text = f"deleted: {count} slot file{'' if count == 1 else 's'}, {size(total_bytes)}"
    return f"{text}; emptied slots: {found['emptied']}" if found["emptied"] else text


def _left_notes(found: ForgottenSlots, asked: ForgetRequest) -> Iterator[str]:
    """Yield what a command cannot know: of what is encrypted, which files belong together."""
    if asked["conversation"] is not None and any(slot["encrypted"] for slot in found["slots"]):
        yield "it is encrypted: only a running daemon finds further files of a conversation"


def _kept_notes(found: ForgottenSlots) -> Iterator[str]:
    if found["in_use"]:
        yield "a request of it is in flight, and what that computes is kept: forget it again then"
