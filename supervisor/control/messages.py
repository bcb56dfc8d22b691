"""The JSON that the daemon and its commands exchange.

A stream (start, stop, reload, events, …) has one object a line, each with one key of StreamMessage.
None is unknown or not applicable; rates are tokens per second of one sequence.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from supervisor.control.layer_messages import MovedLayers
from supervisor.control.slot_messages import SavedSlot
from supervisor.control.trial_messages import CanariesStatus, TrialNote
from supervisor.errors import DaemonBusy, ErrorFields

__all__ = ["ErrorFields"]


class DraftStatus(TypedDict):
    """Tokens drafted and accepted in the latest run; `acceptance` is 0 to 1."""

    drafted: int
    accepted: int
    acceptance: float | None


class InstanceStatus(TypedDict):
    """One llama-server process.

    `retiring`: it only finishes its requests, because new settings replaced it. `progress`: 0 to 1
    while it loads. `engine`: the path of its program, known once it was planned. `draft` is None
    without speculative decoding.
    """

    name: str
    state: str
    retiring: bool
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
    engine: str | None
    log: str | None
    error: ErrorFields | None
    warnings: list[str]
    draft: DraftStatus | None


class WaitStatus(TypedDict):
    """A wait for a model's memory, by requests or (0 requests) a command.

    `place`: 1 for the model that loads next. `leaving`: models that drain to be unloaded.
    """

    place: int
    requests: int
    wait_s: float
    leaving: list[str]


class AdaptedValue(TypedDict):
    """A value that the daemon changed, and why; `key` is the option's name."""

    key: str
    value: str | int | float | bool
    origin: str
    reason: str


class IdleStatus(TypedDict):
    """How long a loaded model may be idle before it is unloaded.

    `limit_s`: None for ever. `unload_in_s`: None while it is busy, or for ever. `origin`: the
    setting `ttl_s`, or the `keep_alive` of a request.
    """

    limit_s: float | None
    unload_in_s: float | None
    origin: Literal["ttl_s", "keep_alive"]


class ModelStatus(TypedDict):
    """One model; `slots` and `ctx_size` are those of one instance, known once it was planned.

    `idle`: None unless it is loaded.

    `state`: loaded, loading (with a `reason` after a failure), unloaded (a request loads it), or
    failed with a `reason`. `adapted`: what follows demand and load; `reduced`: what it gave up
    after its engine ran out of memory.
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
    idle: IdleStatus | None
    not_persisted_reason: str | None
    adapted: list[AdaptedValue]
    reduced: list[AdaptedValue]
    trial: TrialNote | None
    instances: list[InstanceStatus]


class CaptureStatus(TypedDict):
    """A capture that runs; `dropped`: requests and responses that did not get into it."""

    model: str
    requests: int
    responses: int
    dropped: int
    size_bytes: int
    left_s: float


class NodeStatus(TypedDict):
    """`state`: up; or down, draining or same (as another node), with a `reason`.

    A name that stands for nodes has an entry of its own, resolved or unresolved, and each of its
    machines has one. `slots`: of all models, 0 while it is not up.
    """

    name: str
    state: str
    reason: str | None
    url: str
    models: list[str]
    slots: int
    slots_busy: int


class WeightStatus(TypedDict):
    """An instance's share of its model's requests, as a multiple of an average instance's.

    `instance`: of this machine or of a node (`NODE/MODEL`). `reason`: measured, set, or equal.
    """

    instance: str
    model: str
    weight: float
    reason: str


class WorkerStatus(TypedDict):
    """An RPC worker.

    `state`: of one on this machine ready, starting, backoff or failed; of another ready or lost as
    it was when it was last asked, or unknown. `devices_bytes`: memory of each of its devices.
    """

    name: str
    address: str
    local: bool
    state: str
    reason: str | None
    hint: str | None
    pid: int | None
    restarts: int
    devices_bytes: list[int]
    models: list[str]


class BatchQueueStatus(TypedDict):
    """How the batch requests of a model have gathered since the daemon's start."""

    model: str
    total_queued: int
    total_batches: int
    total_single: int
    avg_batch_size: float
    avg_wait_ms: float


class DaemonStatus(TypedDict):
    """`tls_cert`: path of the proxy's certificate; None without TLS.

    `listen`: the address of the proxy as its settings have it.
    `keyless`: the addresses that other machines reach without a key.
    """

    pid: int
    version: str
    url: str
    listen: str
    tls_cert: str | None
    keyless: list[str]
    up_s: float
    stopping: bool
    config: str | None
    models: list[ModelStatus]
    nodes: list[NodeStatus]
    weights: list[WeightStatus]
    workers: list[WorkerStatus]
    capture: CaptureStatus | None
    batches: list[BatchQueueStatus]


class ReloadReport(TypedDict):
    """Names of replicas (`chat.0`), each in one of the first four lists.

    Those in `kept` continue untouched; added or changed ones that did not start are in `failures`.
    """

    added: list[str]
    removed: list[str]
    changed: list[str]
    kept: list[str]
    notes: list[str]
    failures: list[ErrorFields]


class WarmedInstance(TypedDict):
    """An instance that prefilled a prompt: tokens computed, and tokens already in its cache."""

    instance: str
    tokens: int
    cached: int


class EventLine(TypedDict):
    """An event; `fields` are those of supervisor.events.EVENTS, `at` is ISO 8601 in UTC."""

    name: str
    level: str
    at: str
    fields: dict[str, object]


class LoadProgress(TypedDict):
    """The share of a model's weights that an instance has loaded, 0 to 1."""

    instance: str
    fraction: float


class JoinedHost(TypedDict):
    """A desktop host's number, the file that holds its API key, and the daemon at that moment."""

    host: int
    api_key_file: str
    status: DaemonStatus


class StreamMessage(TypedDict):
    """Exactly one key; the last seven end the stream.

    `waiting`: seconds without another message.
    """

    event: NotRequired[EventLine]
    progress: NotRequired[LoadProgress]
    waiting: NotRequired[float]
    host: NotRequired[JoinedHost]
    done: NotRequired[DaemonStatus]
    reloaded: NotRequired[ReloadReport]
    slots: NotRequired[list[SavedSlot]]
    warmed: NotRequired[list[WarmedInstance]]
    moved: NotRequired[MovedLayers]
    canaries: NotRequired[CanariesStatus]
    error: NotRequired[ErrorFields]


def daemon_exited() -> DaemonBusy:
    return DaemonBusy("the daemon exited before the command was done", hint="corral logs shows why")
