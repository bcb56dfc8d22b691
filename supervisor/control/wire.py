"""The shapes that the daemon and its commands exchange, as JSON.

A stream of lines (start, stop, restart, reload, events) carries one object a line, each with one
key: `event` (something happened), `waiting` (nothing did for a while), and last `done`, `reloaded`
or `error`.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ErrorFields(TypedDict):
    """What went wrong; see supervisor.errors."""

    code: str
    message: str
    hint: str | None
    log: str | None


class InstanceStatus(TypedDict):
    """One llama-server process.

    `leaving` is whether it only finishes what it holds, for settings that are no more.
    `progress` is 0 to 1 while loading; rates are tokens per second while decoding; None is unknown.
    """

    name: str
    state: str
    leaving: bool
    pid: int | None
    run: int
    up_s: float | None
    restarts: int
    faults: int
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


class ModelStatus(TypedDict):
    """One model; slots and context are each instance's, known once it was planned."""

    name: str
    aliases: list[str]
    path: str
    profile: str
    slots: int
    ctx_size: int | None
    instances: list[InstanceStatus]


class DaemonStatus(TypedDict):
    """The daemon and all its models."""

    pid: int
    version: str
    url: str
    up_s: float
    stopping: bool
    config: str | None
    models: list[ModelStatus]


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


class EventLine(TypedDict):
    """One event; `fields` are those of supervisor.events.EVENTS."""

    name: str
    level: str
    at: str
    fields: dict[str, object]


class Line(TypedDict):
    """One line of a stream: exactly one of the keys is there."""

    event: NotRequired[EventLine]
    waiting: NotRequired[float]
    done: NotRequired[DaemonStatus]
    reloaded: NotRequired[ReloadReport]
    error: NotRequired[ErrorFields]
