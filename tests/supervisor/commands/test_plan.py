"""What `corral plan` says of conversations."""

from pathlib import Path
from typing import Any

from samples import engine, machine, model

from supervisor.commands.plan import conversations
from supervisor.flags.plan import ModelEntry, Plan, make_plan
from supervisor.flags.profile import load
from supervisor.host.paths import shipped
from supervisor.slot_store.support import unsupported_reason


def planned(**changes: Any) -> Plan:
    entry = ModelEntry("chat", Path("/models/chat.gguf"), flags=changes.pop("flags", {}))
    base = load("base", (shipped("profiles"),))
    return make_plan(entry, base, engine(), model(**changes), machine(), instances=1)


def said(plan: Plan) -> str:
    return conversations(plan, unsupported_reason(plan))


def test_that_conversations_are_kept_is_said() -> None:
    assert said(planned()) == "conversations are kept over restarts"


def test_reason_they_are_not_is_said() -> None:
    text = said(planned(recurrent=True))
    assert text.startswith("conversations are not kept over restarts: parts of it keep a state")
    assert "swa-full" not in text


def test_what_a_whole_window_takes_is_said_where_it_is_cut() -> None:
    window: dict[str, Any] = {"sliding_window": 512, "sliding": (True,) * 30}
    text = said(planned(**window))
    # 4 caches of 8192 tokens for 4 of 1024 and all checkpoints, and the compute buffers for it.
    assert "its sliding window is not saved" in text
    assert text.endswith("with swa-full = true it would be, for 502.0 MiB more an instance")
    whole = planned(**window, flags={"swa-full": True})
    assert said(whole) == "conversations are kept over restarts"
