"""`corral slots list|save|forget`: conversations kept on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisor.commands.status import not_persisted_reason
from supervisor.commands.targets import resolve_running
from supervisor.control.client import Client
from supervisor.control.messages import SavedSlot, StreamMessage
from supervisor.control.status import saved_slot
from supervisor.errors import DaemonBusy, NotRunning, SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, size, table
from supervisor.slot_store.config import store_in
from supervisor.warmup.learned import LearnedPrompts


def list_slots() -> CommandResult:
    """List what is kept, by model, the last used first; a daemon need not run."""
    kept = sorted(store_in(directories()).saved(), key=lambda one: one.used_at, reverse=True)
    found = [saved_slot(one) for one in sorted(kept, key=lambda one: one.model)]
    text = render(found) if found else "no conversations are kept"
    return CommandResult(found, text, (*_learned(), *_unkept()))


def save(words: Sequence[str]) -> CommandResult:
    """Have the daemon save what idle slots hold, and list what is kept then.

    Raises:
        NotRunning: No daemon runs.
        NoSuchModel: A name is not configured.
    """
    client = Client(directories().control_socket)
    names = resolve_running(words, client.status()) if words else []
    found = last_of(client.save_slots(names))["slots"]
    return CommandResult(found, render(found) if found else "nothing was worth saving")


def forget(model: str | None, *, everything: bool) -> CommandResult:
    """Delete what is kept of a model, or everything, learned prompts too; a daemon need not run.

    Raises:
        SettingsInvalid: It is not said which.
    """
    if (model is None) is not everything:
        raise SettingsInvalid("name a model, or give --all", hint="corral slots list shows them")
    where = directories()
    found = [saved_slot(one) for one in store_in(where).forget(model)]
    whole = sum(one["size_bytes"] for one in found)
    learned = LearnedPrompts(where.prompts).forget(model)
    notes = (f"learned prompts forgotten: {learned}",) if learned else ()
    return CommandResult(found, f"forgotten: {len(found)} conversations, {size(whole)}", notes)


def _unkept() -> tuple[str, ...]:
    """Return why models that run keep none, a line each; nothing without a daemon."""
    try:
        return tuple(not_persisted_reason(Client(directories().control_socket).status()["models"]))
    except (NotRunning, DaemonBusy):
        return ()


def _learned() -> tuple[str, ...]:
    """Return a line for each model of which prompts were learned."""
    counts = LearnedPrompts(directories().prompts).counts()
    return tuple(f"learned prompts of {model}: {count}" for model, count in counts.items())


def last_of(lines: Iterable[StreamMessage]) -> StreamMessage:
    """Return the line that ends a stream.

    Raises:
        DaemonBusy: There is none.
    """
    for line in lines:
        if "waiting" not in line:
            return line
    raise DaemonBusy("the daemon ended before it was done", hint="corral logs shows why")


def render(found: Sequence[SavedSlot]) -> str:
    """Return kept conversations as a person reads them; never what was said in them."""
    rows = [
        (
            one["model"],
            str(one["replica"]),
            str(one["tokens"]),
            size(one["size_bytes"]),
            one["saved_at"],
        )
        for one in found
    ]
    return table(("MODEL", "REPLICA", "TOKENS", "SIZE", "SAVED"), rows)
