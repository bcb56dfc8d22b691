"""What happened, as a hook gets it on standard input. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

import orjson

from supervisor.settings.hooks import HookName

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class HookCause:
    """Why it happened.

    Attributes:
        code: Stable, in snake case.
        message: A sentence without a full stop.
        hint: How to fix it, where there is anything to fix.
        log: Path of the engine's log, once a model is given up.
    """

    code: str
    message: str
    hint: str | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class HookEvent:
    """An event for hooks; what does not apply is None.

    Attributes:
        restarts: Whether a failed process is started again.
        idle_s: The time without a request.
    """

    event: HookName
    at: datetime
    model: str | None = None
    instance: str | None = None
    node: str | None = None
    cause: HookCause | None = None
    restarts: bool | None = None
    idle_s: float | None = None

    @property
    def subject(self) -> str:
        """What it happened to; commands for one subject run in the order of its events."""
        if self.model:
            return f"model {self.model}"
        return f"node {self.node}" if self.node else "daemon"

    def as_json(self) -> bytes:
        """One line; every member is always there."""
        members = asdict(self)
        at = members.pop("at").astimezone(UTC).isoformat(timespec="milliseconds")
        line = {"schema": SCHEMA, "event": members.pop("event"), "time": at, **members}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


_EXAMPLE_CAUSES: Final[Mapping[HookName, HookCause]] = {
    "model_unloaded": HookCause("unloaded", "no request came within ttl_s"),
    "model_failed": HookCause(
        "killed",
        "the engine was killed from outside (signal 9)",
        "most often the kernel, out of memory: see `dmesg`; lower ctx-size or use low-memory",
    ),
    "node_down": HookCause("unreachable", "connection refused"),
}


def example(hook: HookName, at: datetime, model: str, node: str) -> HookEvent:
    """Return an event to try a hook with."""
    is_node, is_model = hook.startswith("node_"), hook.startswith("model_")
    has_instance = hook in {"model_loaded", "model_unloaded", "model_failed"}
    return HookEvent(
        hook,
        at,
        model=model if is_model else None,
        instance=f"{model}.0" if has_instance else None,
        node=node if is_node else None,
        cause=_EXAMPLE_CAUSES.get(hook),
        restarts=True if hook == "model_failed" else None,
        idle_s=600.0 if hook.endswith("_idle") else None,
    )
