"""`corral plan` about conversations."""

from pathlib import Path
from typing import Any

from support.samples import engine, machine, model

from supervisor.cli.plan import conversations, kept_text
from supervisor.fleet.model import cache_sizes, saved_room
from supervisor.plan.plan import Plan, make_plan
from supervisor.plan.profile import load
from supervisor.plan.resolve import ModelEntry
from supervisor.slot_store.policy import DiskBudget, unsupported_reason
from supervisor.slot_store.store import RestoreOutcome
from supervisor.system.paths import shipped_directory


def planned(**changes: Any) -> Plan:
    entry = ModelEntry("chat", Path("/models/chat.gguf"), flags=changes.pop("flags", {}))
    base = load("base", (shipped_directory("profiles"),))
    return make_plan(entry, base, engine(), model(**changes), machine(), instances=1)


SAVED = "conversations are saved across restarts"


def shown(plan: Plan, restored: RestoreOutcome | None = None) -> str:
    return conversations(plan, unsupported_reason(plan), restored)


def test_saved_conversations_are_shown_and_whether_the_engine_used_one() -> None:
    untried = shown(planned())
    assert untried == f"{SAVED}; the first restored one will show whether this engine uses them"
    tried = shown(planned(), RestoreOutcome("chat", 790, 775))
    assert tried == f"{SAVED}; this engine found 775 of 790 tokens of the first restored one"
    assert conversations(planned(), None, encrypts=True).startswith(f"{SAVED}, encrypted; ")


def test_how_many_whole_conversations_fit_on_the_disk_is_shown() -> None:
    made = planned(flags={"parallel": 2, "ctx-size": 65536})
    token_bytes, state_bytes, _ = cache_sizes(made)
    full_bytes = round(32768 * token_bytes + state_bytes)
    budget = DiskBudget(2 * full_bytes, model_share=1, is_auto=True)
    count, room = saved_room(made, budget)
    assert count == 2
    assert "(auto) hold 2 conversations of 32768 tokens" in room
    assert conversations(made, None, room=room).startswith(f"{SAVED}; {room}; ")


def test_what_recurrent_layers_can_use_is_shown() -> None:
    text = shown(planned(recurrent=True))
    assert text.startswith(f"{SAVED};")
    assert text.endswith("only if a prompt continues all of it")


def test_the_reason_why_they_are_not_saved_is_shown() -> None:
    text = shown(planned(flags={"spec-type": "draft-eagle3", "cache-ram": 100}))
    assert text == (
        "conversations are not saved across restarts: the cache of its draft model is not saved; "
        "with cache-ram = 0 it need not be"
    )


def test_the_limit_of_a_sliding_window_is_shown() -> None:
    window: dict[str, Any] = {"sliding_window": 512, "sliding": (True,) * 30}
    text = shown(planned(**window))
    assert text.startswith(f"{SAVED};")
    assert text.endswith("its sliding window uses one only if a prompt continues all of it")
    whole = planned(**window, flags={"swa-full": True})
    assert shown(whole).startswith(f"{SAVED};")


def test_what_an_unload_keeps_is_shown() -> None:
    cache = "in the page cache, while nothing else needs the memory"
    gib = 2**30
    found = kept_text(4 * gib, 3 * gib, saves=True)
    now = "now 3.0 GiB of 4.0 GiB"
    assert found == f"an unload keeps conversations on disk, and the weights ({now}) {cache}"
    assert kept_text(4 * gib, None, saves=False) == f"an unload keeps the weights {cache}"
