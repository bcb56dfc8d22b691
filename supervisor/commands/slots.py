"""`corral slots list|save|forget`: conversations kept on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from supervisor.commands.choice import among
from supervisor.commands.status import unkept
from supervisor.control.client import Client
from supervisor.control.report import saved_slot
from supervisor.control.wire import Line, SavedSlot
from supervisor.errors import DaemonBusy, NotRunning, SettingsInvalid
from supervisor.fleet.learned import Learned
from supervisor.fleet.slots.keeping import shelf_in
from supervisor.host.paths import directories
from supervisor.show import Outcome, size, table


def list_slots() -> Outcome:
    """List what is kept, by model, the last used first; a daemon need not run."""
    kept = sorted(shelf_in(directories()).kept(), key=lambda one: one.used_at, reverse=True)
    found = [saved_slot(one) for one in sorted(kept, key=lambda one: one.model)]
    text = render(found) if found else "no conversations are kept"
    return Outcome(found, text, (*_learned(), *_unkept()))


def save(words: Sequence[str]) -> Outcome:
    """Have the daemon save what idle slots hold, and list what is kept then.

    Raises:
        NotRunning: No daemon runs.
        NoSuchModel: A name is not configured.
    """
    client = Client(directories().control_socket)
    names = among(words, client.status()) if words else []
    found = last_of(client.save_slots(names))["slots"]
    return Outcome(found, render(found) if found else "nothing was worth saving")


def forget(model: str | None, *, everything: bool) -> Outcome:
    """Delete what is kept of a model, or everything, learned prompts too; a daemon need not run.

    Raises:
        SettingsInvalid: It is not said which.
    """
    if (model is None) is not everything:
        raise SettingsInvalid("name a model, or give --all", hint="corral slots list shows them")
    where = directories()
    found = [saved_slot(one) for one in shelf_in(where).forget(model)]
    whole = sum(one["size_bytes"] for one in found)
    learned = Learned(where.prompts).forget(model)
    notes = (f"learned prompts forgotten: {learned}",) if learned else ()
    return Outcome(found, f"forgotten: {len(found)} conversations, {size(whole)}", notes)


def _unkept() -> tuple[str, ...]:
    """Return why models that run keep none, a line each; nothing without a daemon."""
    try:
        return tuple(unkept(Client(directories().control_socket).status()["models"]))
    except (NotRunning, DaemonBusy):
        return ()


def _learned() -> tuple[str, ...]:
    """Return a line for each model of which prompts were learned."""
    counts = Learned(directories().prompts).counts()
    return tuple(f"learned prompts of {model}: {count}" for model, count in counts.items())


def last_of(lines: Iterable[Line]) -> Line:
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
