"""`corral slots list|save`: conversations and learned prompts on disk."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.commands.status import not_persisted_reasons
from supervisor.control.client import Client
from supervisor.control.running import last_message, resolve_running
from supervisor.control.slot_messages import SavedSlot
from supervisor.control.status import saved_slot
from supervisor.errors import DaemonBusy, NotRunning
from supervisor.host.paths import directories
from supervisor.output import CommandResult, size, table
from supervisor.slot_store.config import store_in
from supervisor.warmup.learned import LearnedPrompts


def list_slots() -> CommandResult:
    """List saved conversations by model, the last used first; works without a daemon."""
    kept = sorted(store_in(directories()).saved(), key=lambda one: one.used_at, reverse=True)
    found = [saved_slot(one) for one in sorted(kept, key=lambda one: one.model)]
    text = render(found) if found else "no saved conversations"
    return CommandResult(found, text, (*_encrypted(found), *_learned(), *_not_persisted()))


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


def _encrypted(found: Sequence[SavedSlot]) -> list[str]:
    count = sum(one["encrypted"] for one in found)
    return [f"encrypted: {count} of {len(found)}"] if count else []


def _learned() -> list[str]:
    counts = LearnedPrompts(directories().prompts).counts()
    return [f"learned prompts of {model}: {count}" for model, count in counts.items()]


def render(found: Sequence[SavedSlot]) -> str:
    rows = [
        (
            one["name"],
            one["model"],
            str(one["replica"]),
            str(one["tokens"]),
            size(one["size_bytes"]),
            one["saved_at"],
        )
        for one in found
    ]
    return table(("NAME", "MODEL", "REPLICA", "TOKENS", "SIZE", "SAVED"), rows)
