"""Defines the answers of the daemon to its commands, and texts about them.

orjson writes these dataclasses as JSON, and `read` makes them of it again. None means unknown or
not applicable. Rates are tokens per second of one sequence; times named `…_at` are ISO 8601 in UTC.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, dataclass_transform, get_args, get_type_hints

from supervisor.errors import DaemonBusy, ErrorFields
from supervisor.output import duration, size

if TYPE_CHECKING:
    from dataclasses import Field
    from typing import ClassVar, Self

    from proxy.observe.past import RequestStats


def read(kind: Any, value: Any) -> Any:
    """Make a value of a type (dataclass, list, or None as alternative) of parsed JSON.

    The daemon may be older or newer: missing members become None, unknown ones are left out.
    """
    arguments = get_args(kind)
    if isinstance(value, list) and arguments:
        return [read(arguments[0], item) for item in value]
    answer: Any = next(filter(is_dataclass, (kind, *arguments)), None)
    if answer is None or value is None:
        return None if kind is NoneType else value
    return answer(**{name: read(hint, value.get(name)) for name, hint in _hints(answer).items()})


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


@dataclass_transform(eq_default=False)
class Message:
    """A dataclass that nothing compares or prints: so `corral status` starts 4 ms sooner."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(repr=False, eq=False)(cls)

    @classmethod
    def of(cls, source: object, **members: Any) -> Self:
        """Make a message of these members; a source has the others, by the same names."""
        others = cls.__dataclass_fields__.keys() - members
        return cls(**{name: getattr(source, name) for name in others}, **members)


class ShardStatus(Message):
    """One worker of a split model, since the model was loaded; `last_update` is ISO 8601 in UTC.

    `layers_max`: number of layers that fit into its memory. `suggested_layers`: None if no move is
    suggested. `has_output`: it also computes the output layer, which `layer_count` does not count.
    """

    shard_name: str
    layer_count: int
    has_output: bool
    layers_max: int | None
    suggested_layers: int | None
    total_forwards: int
    total_latency_us: int
    min_latency_us: int | None
    max_latency_us: int
    last_latency_us: int
    last_update: str | None
    avg_latency_us: int
    avg_latency_per_layer_us: int


class BalanceStatus(Message):
    """The workers of one instance; `decision`: balanced, insufficient_data or rebalance.

    `estimated_speedup`: for one stream; `bottleneck_speedup`: for the slowest worker alone.
    """

    model: str
    instance: str
    decision: str
    reason: str
    estimated_speedup: float | None
    bottleneck_speedup: float | None
    shards: list[ShardStatus]


class MovedLayers(Message):
    """Layers by worker before and after a move, which `file` records.

    `estimated_speedup`: None if the layers were moved back.
    """

    model: str
    before: dict[str, int]
    after: dict[str, int]
    reason: str
    estimated_speedup: float | None
    file: str


class SavedSlot(Message):
    """A saved conversation; `adapters`: the files that computed it, each with its scale if not 1.

    They are unknown of an encrypted file whose key is missing.
    """

    name: str
    model: str
    replica: int
    tokens: int
    size_bytes: int
    saved_at: str
    encrypted: bool
    adapters: list[str]


class ForgottenSlots(Message):
    """The deleted files; `emptied`: number of engine slots that were emptied.

    `in_use`: a request in flight still belongs to the conversation.
    """

    slots: list[SavedSlot]
    emptied: int
    in_use: bool


class TierStatus(Message):
    """One place where prompts are kept: `slot`, `host_cache` or `disk`.

    `limit_bytes`: None without a limit of its own. The last three count since the daemon's start.
    """

    tier: str
    conversations: int | None
    tokens: int | None
    size_bytes: int | None
    limit_bytes: int | None
    prompts: int
    found_tokens: int
    saved_s: float


class SlotFileStatus(Message):
    """Saves or restores of single slots since the daemon's start."""

    count: int
    failures: int
    tokens: int
    size_bytes: int
    duration_s: float


class NextTurnStatus(Message):
    """Next turns computed before they came, since the daemon's start.

    `aborted`: by requests. `used_tokens`: of the `computed_tokens`, those that the next turn found;
    `missed_tokens`: those that it did not find. `duration_s`: time that engines spent.
    """

    computed: int
    aborted: int
    computed_tokens: int
    used_tokens: int
    missed_tokens: int
    duration_s: float


class SlotDiskStatus(Message):
    """The slot files of all models. Without a daemon only `size_bytes` is known.

    `limit_is_auto`: the limit follows the free room of the disk.

    `written_bytes`: in the last hour; `write_limit_bytes`: its limit. `paused`: saving is paused
    because the disk failed.
    """

    size_bytes: int
    limit_bytes: int | None = None
    limit_is_auto: bool = False
    written_bytes: int | None = None
    write_limit_bytes: int | None = None
    paused: bool = False


class PausedRequest(Message):
    """A batch request that gave up its slot `paused_s` ago, and waits to go on."""

    request: str
    client: str
    paused_s: float


class CacheStatus(Message):
    """The places that keep the prompts of one model.

    `slots`: of all instances. `prompts`, `prompt_tokens`, `computed_tokens`: since the daemon's
    start. `oldest_at`: time of the oldest file on disk. `skipped`: number of conversations that
    were not saved, by reason (`cost`, `limit`). `held`: slots that are held for agents' next turns
    now, by instance and slot, with the seconds left. `holds`: their number since the start, by how
    they ended (`kept`, `expired`, `yielded`, `ended`); `held_s`: their time. `paused`: batch
    requests that gave up their slots and wait; `handovers`: number of answers that went on after
    that; `handovers_s`: the time that they and their slots lost by it.
    """

    model: str
    slots: int
    prompts: int
    prompt_tokens: int
    computed_tokens: int
    tiers: list[TierStatus]
    oldest_at: str | None
    saves: SlotFileStatus
    restores: SlotFileStatus
    next_turns: NextTurnStatus
    skipped: dict[str, int]
    not_saved_reason: str | None
    held: dict[str, float]
    holds: dict[str, int]
    held_s: float
    paused: list[PausedRequest]
    handovers: int
    handovers_s: float


class CachesStatus(Message):
    models: list[CacheStatus]
    disk: SlotDiskStatus


class TrialNote(Message):
    """A trial in a model's status: `instance` runs `profile` for a share of the conversations.

    `is_canary`: it tries another engine, and is not in the settings.
    """

    profile: str
    is_canary: bool
    share: float
    instance: str


class TrialSideStatus(Message):
    """One side of a trial; rates and times are medians, `memory_bytes` is per instance."""

    profile: str
    instances: list[str]
    conversations: int
    requests: int
    errors: int
    crashes: int
    tokens_per_second: float | None
    first_token_s: float | None
    memory_bytes: int | None


class TrialComparison(Message):
    """Ratio of the trial to the model's own profile, with its 95 % confidence interval.

    `requests_to_go`: requests of both sides until a difference of 5 % would be visible.
    """

    ratio: float | None
    low: float | None
    high: float | None
    is_different: bool
    outcome: str
    requests_to_go: int | None


class FlagDifference(Message):
    """An option whose value differs between the sides; None: the side does not set it."""

    flag: str
    base: str | None
    trial: str | None


class TrialStatus(Message):
    """The trial of one model; `state` is the state of its instance."""

    model: str
    share: float
    state: str
    error: ErrorFields | None
    age_s: float
    base: TrialSideStatus
    trial: TrialSideStatus
    tokens_per_second: TrialComparison
    first_token_s: TrialComparison
    differences: list[FlagDifference]
    notes: list[str]


class CanaryStatus(Message):
    """A running canary; `trial`: its figures, None before the first.

    `decides_in_s`: None if only a command decides. `obstacle`: why it was not promoted
    automatically.
    """

    model: str
    engine: str
    own_engine: str | None
    share: float
    margin: float
    decides_in_s: float | None
    obstacle: str | None
    trial: TrialStatus | None


class CanariesStatus(Message):
    """All canaries; `ended`: the latest 16, as `experiments.canaries` stores them."""

    running: list[CanaryStatus]
    ended: list[dict[str, str]]


class DraftStatus(Message):
    """Tokens drafted and accepted in the latest run; `acceptance`: 0 to 1.

    `path`: of the draft model; None if the model or its text drafts.
    """

    drafted: int
    accepted: int
    acceptance: float | None
    path: str | None


class InstanceStatus(Message):
    """One llama-server process.

    `retiring`: new settings replaced it, so it only finishes its requests. `progress`: 0 to 1
    while it loads. `engine`: path of its program, known once it is planned. `draft`: None without
    speculative decoding.
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


class WaitStatus(Message):
    """A model that waits to be loaded, for its requests or (if `requests` is 0) for a command.

    `place`: 1 for the model that loads next. `leaving`: models that drain before they are unloaded.
    `rule`: the rule of a group by which others must go first; None if it waits for memory.
    """

    place: int
    requests: int
    wait_s: float
    leaving: list[str]
    rule: str | None


class AdaptedValue(Message):
    """An option (`key`) that the daemon changed, and the reason."""

    key: str
    value: str | int | float | bool
    origin: str
    reason: str


class IdleStatus(Message):
    """How long a loaded model may be idle before it is unloaded.

    `limit_s`: None for no limit. `unload_in_s`: None while the model is busy, or without a limit.
    `origin`: the setting `ttl_s`, or the `keep_alive` of a request.
    """

    limit_s: float | None
    unload_in_s: float | None
    origin: Literal["ttl_s", "keep_alive"]


class ModelStatus(Message):
    """One model; `slots` and `ctx_size` are per instance, and known once it is planned.

    `state`: loaded, loading (with a `reason` after a failure), unloaded (a request loads it), or
    failed with a `reason`. `preload`: whether a start of all models loads it. `idle`: None unless
    loaded. `adapted`: options that follow demand and load. `reduced`: options that were lowered
    after the engine ran out of memory. `engine_tools`: whether clients reach the tools of its
    engines: no, from this machine, or from others too. `changed`: settings of `[models.NAME]` that
    a command changed until the daemon ends. `chats`: False for a model that only makes embeddings
    or ranks texts.
    """

    name: str
    state: str
    reason: str | None
    preload: bool
    aliases: list[str]
    path: str
    profile: str
    slots: int
    ctx_size: int | None
    waiting: WaitStatus | None
    idle: IdleStatus | None
    not_persisted_reason: str | None
    engine_tools: Literal["off", "local", "network"]
    chats: bool
    changed: dict[str, Any]
    adapted: list[AdaptedValue]
    reduced: list[AdaptedValue]
    trial: TrialNote | None
    instances: list[InstanceStatus]


class CaptureStatus(Message):
    """A running capture; `dropped`: requests and responses that it could not take."""

    model: str
    requests: int
    responses: int
    dropped: int
    size_bytes: int
    left_s: float


class NodeStatus(Message):
    """A node; `state`: up; or down, draining or same (as another node), with a `reason`.

    A name that stands for several nodes has its own entry, `resolved` or `unresolved`, beside those
    of its machines. `slots`: of all models; 0 unless the node is up. `received_bytes`: of its
    responses to this daemon.
    """

    name: str
    state: str
    reason: str | None
    url: str
    models: list[str]
    slots: int
    slots_busy: int
    received_bytes: int


class WeightStatus(Message):
    """An instance's share of its model's requests, relative to an average instance.

    `instance`: on this machine, or on a node (`NODE/MODEL`). `reason`: measured, set or equal.
    """

    instance: str
    model: str
    weight: float
    reason: str


class WorkerStatus(Message):
    """An RPC worker; `devices_bytes`: memory of each device.

    `state` of a local worker: ready, starting, backoff or failed. Of a remote worker: ready or lost
    at the last probe, or unknown.
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


class BatchQueueStatus(Message):
    """Batches formed from the queued batch requests of a model since the daemon's start."""

    model: str
    total_queued: int
    total_batches: int
    total_single: int
    avg_batch_size: float
    avg_wait_ms: float


class DeviceStatus(Message):
    """An accelerator, for all programs; `throttled`: by power, temperature, current or hardware.

    `load`: 0 to 1. `problem`: why it has no figures.
    """

    id: str
    name: str
    load: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    throttled: list[str] | None
    problem: str | None


class YieldStatus(Message):
    """Devices are left to other programs; `left_s`: None without a limit."""

    left_s: float | None
    models: list[str]
    is_quiet_hours: bool | None


class DaemonStatus(Message):
    """The daemon, its models and instances.

    `tls_cert`: path of the proxy's certificate; None without TLS. `listen`: the proxy's address
    as in the settings. `keyless`: addresses that other machines can use without a key. `groups`:
    the rules of `[groups]`.
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
    groups: list[str]
    nodes: list[NodeStatus]
    weights: list[WeightStatus]
    workers: list[WorkerStatus]
    capture: CaptureStatus | None
    batches: list[BatchQueueStatus]
    devices: list[DeviceStatus]
    yielded: YieldStatus | None
    gave_way: list[str] | None


class ReloadReport(Message):
    """Names of replicas (`chat.0`), each in one of the first four lists.

    Replicas in `kept` continue untouched. `failures`: added or changed replicas that did not start.
    """

    added: list[str]
    removed: list[str]
    changed: list[str]
    kept: list[str]
    notes: list[str]
    failures: list[ErrorFields]


class WarmedInstance(Message):
    """An instance that prefilled a prompt: `tokens` computed, `cached` tokens found."""

    instance: str
    tokens: int
    cached: int


class JoinedHost(Message):
    """The number of a new desktop host, the file with its API key, and the daemon's status."""

    host: int
    api_key_file: str
    status: DaemonStatus


def daemon_exited_error() -> DaemonBusy:
    return DaemonBusy("the daemon exited before the command was done", hint="corral logs shows why")


def phase_text(request: RequestStats) -> str:
    if request.phase == "queued":
        return f"queued, place {request.position}"
    if request.phase == "prefill" and request.prompt_tokens:
        return f"prefill {request.prompt_tokens_done} of {request.prompt_tokens}"
    return request.phase


def capture_text(status: CaptureStatus) -> str:
    dropped = f", {status.dropped} dropped" if status.dropped else ""
    return (
        f"{status.model}: its requests are captured, {status.requests} so far{dropped}, "
        f"{size(status.size_bytes)}, for {duration(status.left_s)} more"
    )


def yield_text(status: YieldStatus) -> str:
    left_s = status.left_s
    time = "until corral yield --end" if left_s is None else f"for {duration(round(left_s))}"
    reason = " (quiet hours)" if status.is_quiet_hours else ""
    stopped = f"; stopped for that: {', '.join(status.models)}" if status.models else ""
    return f"the devices are left to other programs {time}{reason}{stopped}"


def gave_way_text(model: str) -> str:
    return f"{model}: unloaded because other programs need memory; returns when there is room"


ADD_KEY: Final = "corral key add NAME adds a key; then set api_keys_file under [proxy]"


def state_text(model: ModelStatus, instance: InstanceStatus) -> str:
    if instance.state == "stopped" and model.state == "unloaded":
        # A request loads it, unlike a model that was stopped.
        return "waiting" if model.waiting else "unloaded"
    if instance.state == "starting" and instance.progress is not None:
        return f"starting {instance.progress:.0%}"
    if instance.retry_in_s is not None:
        return f"backoff {instance.retry_in_s:.0f} s"
    return instance.state


DEVICE_COLUMNS: Final = ("DEVICE", "LOAD", "DEVICE MEMORY", "TEMPERATURE", "POWER", "THROTTLED BY")


def device_row(device: DeviceStatus) -> tuple[str, ...]:
    """Return the cells of DEVICE_COLUMNS."""

    def of(used: str, limit: str | None) -> str:
        return f"{used} of {limit}" if limit else used

    known, total = device.memory_used_bytes, device.memory_total_bytes
    power, limit = device.power_w, device.power_limit_w
    return (
        device.name,
        "-" if device.load is None else f"{device.load:.0%}",
        "-" if known is None else of(size(known), size(total) if total else None),
        "-" if device.temperature_c is None else f"{device.temperature_c:.0f} °C",
        "-" if power is None else of(f"{power:.0f}", f"{limit:.0f}" if limit else None) + " W",
        device.problem or ("-" if device.throttled is None else ", ".join(device.throttled)),
    )


def failed_text(instance: InstanceStatus) -> str | None:
    """Return how to start a failed instance again; None if it has not failed."""
    if instance.state != "failed":
        return None
    model = instance.name.rpartition(".")[0]
    return f"it is not restarted any more; `corral start {model}` starts it again"


def tools_warning(model: ModelStatus) -> tuple[str, ...]:
    """Return a warning if clients may use the tools of a model's engines."""
    if model.engine_tools == "off":
        return ()
    text = f"{model.name}: engine_tools is on: {TOOLS_RUN}"
    if model.engine_tools == "network":
        text = f"DANGER: {text}; other machines reach them {WITH_TOOLS_KEY}"
    return (text,)


# What `engine_tools` means.
TOOLS_RUN: Final = "its engines run the tools and MCP servers of its flags as this user"
WITH_TOOLS_KEY: Final = "with an API key that has tools = true"


def keyless_warning(status: DaemonStatus) -> tuple[str, ...]:
    """Return a warning if other machines can send requests without a key."""
    if not status.keyless:
        return ()
    addresses = " and ".join(status.keyless)
    return (f"other machines can reach {addresses}, and no key is required: {ADD_KEY}",)
