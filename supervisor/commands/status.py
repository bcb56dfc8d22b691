"""`corral status`: state, load and speed of all models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from supervisor.control.capture_text import capture_text
from supervisor.control.client import Client
from supervisor.control.messages import (
    BatchQueueStatus,
    DaemonStatus,
    InstanceStatus,
    ModelStatus,
    NodeStatus,
    WeightStatus,
    WorkerStatus,
)
from supervisor.control.state_text import failed_text, keyless_warning, state_text
from supervisor.errors import NotRunning
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored, duration, size, table

_HEAD = ("INSTANCE", "STATE", "PID", "SLOTS", "TOK/S", "MEMORY", "UP", "RESTARTS")
_NODES_HEAD = ("NODE", "STATE", "SLOTS", "URL", "MODELS")
_WEIGHTS_HEAD = ("REQUESTS TO", "WEIGHT", "REASON")
_WORKERS_HEAD = ("WORKER", "STATE", "ADDRESS", "PID", "MEMORY", "MODELS", "RESTARTS")
_BATCHES_HEAD = ("BATCHES OF", "REQUESTS", "BATCHES", "SINGLE", "MEAN SIZE", "MEAN WAIT")
_STYLES = {"ready": "green", "failed": "red", "backoff": "yellow", "unhealthy": "yellow"}


def status() -> CommandResult:
    """Query the daemon; exit code 3 if it is not running (Source: LSB, as systemctl status)."""
    try:
        found = Client(directories().control_socket).status()
    except NotRunning as error:
        return CommandResult(
            {"running": False}, error.message, (error.hint or "",), error.exit_code
        )
    return CommandResult({"running": True, **found}, render(found))


def render(status: DaemonStatus) -> str:
    models = status["models"]
    instances = [(model, instance) for model in models for instance in model["instances"]]
    lines = [
        f"llama-corral {status['version']} · pid {status['pid']} · up {duration(status['up_s'])}"
        + (", stopping" if status["stopping"] else ""),
        f"{status['url']}/v1",
        *(colored(line, "yellow") for line in keyless_warning(status)),
        "",
        table(_HEAD, [_row(model, instance) for model, instance in instances]),
        *(line for model in models for line in _waiting(model)),
        *(line for model in models for line in _idle(model)),
        *(line for model in models for line in _trial(model)),
        *_capture(status),
        *(line for model in models for line in _adapted(model)),
        *(f"\n{colored(line, 'yellow')}" for model in models for line in reductions(model)),
        *(line for _, instance in instances for line in _draft(instance)),
        *(f"\n{line}" for line in not_persisted_reasons(models)),
        *(line for _, instance in instances for line in _problems(instance)),
        *_workers(status["workers"]),
        *_nodes(status["nodes"]),
        *_weights(status["weights"]),
        *_batches(status["batches"]),
    ]
    return "\n".join(lines)


def _row(model: ModelStatus, instance: InstanceStatus) -> tuple[str, ...]:
    speed = instance["tokens_per_second"]
    return (
        instance["name"],
        state_text(model, instance),
        str(instance["pid"] or "-"),
        f"{instance['slots_busy']}/{instance['slots']}",
        "-" if speed is None else f"{speed:.1f}",
        size(instance["memory_bytes"]),
        duration(instance["up_s"]),
        str(instance["restarts"]),
    )


def _waiting(model: ModelStatus) -> Iterator[str]:
    if found := model["waiting"]:
        queued = f"{found['requests']} waiting" if found["requests"] else "a command is waiting"
        place = f", place {found['place']}" if found["place"] > 1 else ""
        leaving = " and ".join(found["leaving"])
        no_requests = f"; no new requests for {leaving}" if leaving else ""
        time = duration(found["wait_s"])
        yield f"\n{model['name']}: {queued} for memory, {time} so far{place}{no_requests}"


def _idle(model: ModelStatus) -> Iterator[str]:
    """Say when a model is unloaded, where it is or where a request keeps it."""
    found = model["idle"]
    if found is None or (found["limit_s"] is None and found["origin"] == "ttl_s"):
        return
    if found["limit_s"] is None:
        text = "stays loaded"
    elif found["unload_in_s"] is None:
        text = f"unloaded {duration(found['limit_s'])} after its last request"
    else:
        text = f"unloaded in {duration(found['unload_in_s'])} without a request"
    yield f"\n{model['name']}: {text} ({found['origin']})"


def _adapted(model: ModelStatus) -> Iterator[str]:
    for one in model["adapted"]:
        yield f"\n{model['name']}: {one['key']} = {one['value']} now: {one['reason']}"


def reductions(model: ModelStatus) -> Iterator[str]:
    """Yield what a model gave up after its engine ran out of memory."""
    for one in model["reduced"]:
        yield (
            f"{model['name']}: {one['key']} = {one['value']} for want of memory: {one['reason']}"
        )


def _trial(model: ModelStatus) -> Iterator[str]:
    if found := model["trial"]:
        share = f"{100 * found['share']:g} % of new conversations"
        command = "corral engine canary" if found["is_canary"] else "corral trial"
        yield f"\n{found['instance']}: {found['profile']} on trial, {share} ({command})"


def not_persisted_reasons(models: Iterable[ModelStatus]) -> list[str]:
    return [
        f"{one['name']} saves no conversations across restarts: {one['not_persisted_reason']}"
        for one in models
        if one["not_persisted_reason"]
    ]


def _capture(status: DaemonStatus) -> Iterator[str]:
    if running := status["capture"]:
        yield f"\n{colored(capture_text(running), 'yellow')} (corral capture --stop)"


def _draft(instance: InstanceStatus) -> Iterator[str]:
    draft = instance["draft"]
    if draft and draft["acceptance"] is not None:
        accepted = f"accepts {draft['acceptance']:.0%} of {draft['drafted']} drafted tokens"
        yield f"\n{instance['name']}: {accepted}"


def _workers(workers: list[WorkerStatus]) -> list[str]:
    if not workers:
        return []
    problems = [one for one in workers if one["reason"]]
    lines = [f"\n{one['name']}: {colored(one['reason'] or '', 'red')}" for one in problems]
    return ["", table(_WORKERS_HEAD, [*map(_worker_row, workers)]), *lines]


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    return (
        worker["name"],
        worker["state"],
        worker["address"],
        str(worker["pid"] or "-"),
        size(sum(worker["devices_bytes"]) or None),
        ", ".join(worker["models"]) or "-",
        str(worker["restarts"]),
    )


def _nodes(nodes: list[NodeStatus]) -> list[str]:
    if not nodes:
        return []
    lines = [f"\n{one['name']}: {colored(one['reason'], 'red')}" for one in nodes if one["reason"]]
    return ["", table(_NODES_HEAD, [*map(_node_row, nodes)]), *lines]


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    slots = f"{node['slots_busy']}/{node['slots']}"
    return node["name"], node["state"], slots, node["url"], ", ".join(node["models"]) or "-"


def _weights(weights: list[WeightStatus]) -> list[str]:
    """Return the table of weights; of models whose instances are not all equal."""
    unequal = {one["model"] for one in weights if one["reason"] != "equal"}
    rows = [
        (one["instance"], f"{one['weight']:.2f}", one["reason"])
        for one in weights
        if one["model"] in unequal
    ]
    return ["", table(_WEIGHTS_HEAD, rows)] if rows else []


def _batches(batches: list[BatchQueueStatus]) -> list[str]:
    return ["", table(_BATCHES_HEAD, [*map(_batch_row, batches)])] if batches else []


def _batch_row(one: BatchQueueStatus) -> tuple[str, ...]:
    return (
        one["model"],
        *(str(one[name]) for name in ("total_queued", "total_batches", "total_single")),
        f"{one['avg_batch_size']:.1f}" if one["total_batches"] else "-",
        f"{one['avg_wait_ms']:.0f} ms",
    )


def _problems(instance: InstanceStatus) -> Iterator[str]:
    for text in instance["warnings"]:
        yield f"\n{instance['name']}: {colored(text, 'yellow')}"
    if error := instance["error"]:
        yield f"\n{instance['name']}: {colored(error['message'], 'red')}"
        yield from (f"  {label}: {error[label]}" for label in ("hint", "log") if error[label])
        if again := failed_text(instance):
            yield f"  {again}"
