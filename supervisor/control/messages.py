"""The shapes that the daemon and its commands exchange, as JSON.

A stream of lines (start, stop, restart, reload, events and the rest) carries one object a line,
each with one key: `event` (something happened), `waiting` (nothing did for a while), and last
`done`, `reloaded`, `slots`, `warmed` or `error`.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ErrorFields(TypedDict):
    """What went wrong; see supervisor.errors."""

    code: str
    message: str
    hint: str | None
    log: str | None


class DraftStatus(TypedDict):
    """Tokens drafted and accepted in the latest run; `acceptance` is 0 to 1."""

    drafted: int
    accepted: int
    acceptance: float | None


class InstanceStatus(TypedDict):
    """One llama-server process.

    `leaving` is whether it only finishes what it holds, for settings that are no more.
    `progress` is 0 to 1 while loading; rates are tokens per second while decoding; None is unknown.
    `draft` is None without speculative decoding.
    """

    name: str
    state: str
    leaving: bool
    pid: int | None
    run: int
    up_s: float | None
    restarts: int
    failures: int
    retry_in_s: float | None
    progress: float | None
    slots: int
    slots_busy: int
    tokens_per_second: float | None
    memory_bytes: int | None
    address: str
    log: str | None
    error: ErrorFields | None
    warnings: list[str]
    draft: DraftStatus | None


class WaitStatus(TypedDict):
    """What waits for a model's memory: requests, or only a command.

    `place` is the model's turn among those that wait, 1 for the first; `leaving` are models that
    get nothing new, so that they can leave for it.
    """

    place: int
    requests: int
    wait_s: float
    leaving: list[str]


class ModelStatus(TypedDict):
    """One model; slots and context are each instance's, known once it was planned.

    `state` is loaded, loading, unloaded (a request brings it up) or failed, for the `reason` given.
    `waiting` is None where nothing waits for it to come into memory. `not_persisted_reason` says
    why its conversations do not outlive their engine; None where they do, or before it was planned.
    """

    name: str
    state: str
    reason: str | None
    aliases: list[str]
    path: str
    profile: str
    slots: int
    ctx_size: int | None
    waiting: WaitStatus | None
    not_persisted_reason: str | None
    instances: list[InstanceStatus]


class NodeStatus(TypedDict):
    """Another machine; `state` is up or down, for the `reason` given.

    `slots` are the requests it gets at once over all its models, 0 while it is down.
    """

    name: str
    state: str
    reason: str | None
    url: str
    models: list[str]
    slots: int
    slots_busy: int


class DaemonStatus(TypedDict):
    """The daemon, all its models, and the other machines it knows."""

    pid: int
    version: str
    url: str
    up_s: float
    stopping: bool
    config: str | None
    models: list[ModelStatus]
    nodes: list[NodeStatus]


class ReloadReport(TypedDict):
    """What a reload did, or would do; replicas are named as `chat.0`.

    Each replica stands in one of the first four; of those changed and added, some may have failed,
    and `failures` says why. Those kept run on untouched.
    """

    added: list[str]
    removed: list[str]
    changed: list[str]
    kept: list[str]
    notes: list[str]
    failures: list[ErrorFields]


class SavedSlot(TypedDict):
    """One conversation that is kept; `saved_at` is ISO 8601 in UTC."""

    name: str
    model: str
    replica: int
    tokens: int
    size_bytes: int
    saved_at: str


class WarmedInstance(TypedDict):
    """An instance that has read a prompt: the tokens it computed, and those it had already."""

    instance: str
    tokens: int
    cached: int


class EventLine(TypedDict):
    """One event; `fields` are those of supervisor.events.EVENTS."""

    name: str
    level: str
    at: str
    fields: dict[str, object]


class StreamMessage(TypedDict):
    """One line of a stream: exactly one of the keys is there."""

    event: NotRequired[EventLine]
    waiting: NotRequired[float]
    done: NotRequired[DaemonStatus]
    reloaded: NotRequired[ReloadReport]
    slots: NotRequired[list[SavedSlot]]
    warmed: NotRequired[list[WarmedInstance]]
    error: NotRequired[ErrorFields]
