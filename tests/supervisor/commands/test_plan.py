"""What `corral plan` shows about conversations."""

from pathlib import Path
from typing import Any

from samples import engine, machine, model

from supervisor.commands.plan import conversations
from supervisor.flags.plan import ModelEntry, Plan, make_plan
from supervisor.flags.profile import load
from supervisor.host.paths import shipped
from supervisor.slot_store.policy import unsupported_reason


def planned(**changes: Any) -> Plan:
    entry = ModelEntry("chat", Path("/models/chat.gguf"), flags=changes.pop("flags", {}))
    base = load("base", (shipped("profiles"),))
    return make_plan(entry, base, engine(), model(**changes), machine(), instances=1)


def shown(plan: Plan) -> str:
    return conversations(plan, unsupported_reason(plan))


def test_saved_conversations_are_shown() -> None:
    assert shown(planned()) == "conversations are saved across restarts"


def test_the_reason_why_they_are_not_saved_is_shown() -> None:
    text = shown(planned(recurrent=True))
    assert text.startswith(
        "conversations are not saved across restarts: its recurrent layers keep a state"
    )
    assert "swa-full" not in text


def test_the_memory_of_a_full_window_is_shown_for_sliding_windows() -> None:
    window: dict[str, Any] = {"sliding_window": 512, "sliding": (True,) * 30}
    text = shown(planned(**window))
    # 4 caches of 8192 tokens for 4 of 1024 and all checkpoints, and the compute buffers for it.
    assert "its sliding window is not saved" in text
    assert text.endswith("with swa-full = true it would be, for 502.0 MiB more per instance")
    whole = planned(**window, flags={"swa-full": True})
    assert shown(whole) == "conversations are saved across restarts"
