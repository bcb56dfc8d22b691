"""`corral slots forget`: deletes conversations, through the daemon where one runs."""

from __future__ import annotations

from collections.abc import Iterator

from supervisor.control.client import Client
from supervisor.control.slot_messages import ForgetRequest, ForgottenSlots
from supervisor.control.status import saved_slot
from supervisor.errors import NoSuchConversation, NotRunning, SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, size
from supervisor.slot_store.config import store_in
from supervisor.slot_store.conversation_files import file_named, of_conversation, turns_of
from supervisor.slot_store.store import SlotStore
from supervisor.warmup.learned import LearnedPrompts


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
    return CommandResult(found["slots"], _forgotten(found), tuple(notes))


def _forget_on_disk(store: SlotStore, asked: ForgetRequest) -> ForgottenSlots:
    if asked["request"] is not None:
        raise NoSuchConversation(
            "only a running daemon knows the conversation of a request",
            hint="corral slots list has the names of those that are saved",
        )
    if asked["conversation"] is None:
        gone = store.forget(asked["model"])
    else:
        saved = store.saved()
        turns = turns_of(saved)
        name = file_named(turns, asked["conversation"])
        names = {name, *of_conversation(turns, turns[name])[0]}
        gone = [one for one in saved if one.name in names]
        store.forget_files(gone)
    return {"slots": [saved_slot(one) for one in gone], "emptied": 0, "in_use": False}


def _forgotten(found: ForgottenSlots) -> str:
    total_bytes = sum(one["size_bytes"] for one in found["slots"])
    count = len(found["slots"])
    text = f"deleted: {count} slot file{'' if count == 1 else 's'}, {size(total_bytes)}"
    return f"{text}; emptied slots: {found['emptied']}" if found["emptied"] else text


def _left_notes(found: ForgottenSlots, asked: ForgetRequest) -> Iterator[str]:
    """Yield what a command cannot know: of what is encrypted, which files belong together."""
    if asked["conversation"] is not None and any(one["encrypted"] for one in found["slots"]):
        yield "it is encrypted: only a running daemon finds further files of a conversation"


def _kept_notes(found: ForgottenSlots) -> Iterator[str]:
    if found["in_use"]:
        yield "a request of it is in flight, and what that computes is kept: forget it again then"
