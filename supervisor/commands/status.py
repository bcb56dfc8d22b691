"""`corral status`: what runs, how busy, how fast."""

from __future__ import annotations

from collections.abc import Iterable

from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, InstanceStatus, ModelStatus, NodeStatus
from supervisor.errors import NotRunning
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored, duration, size, table

_HEAD = ("INSTANCE", "STATE", "PID", "SLOTS", "TOK/S", "MEMORY", "UP", "RESTARTS")
_NODES_HEAD = ("NODE", "STATE", "SLOTS", "URL", "MODELS")
_STYLES = {"ready": "green", "failed": "red", "backoff": "yellow", "unhealthy": "yellow"}


def status() -> CommandResult:
    """Ask the daemon; exit code 3 when there is none (Source: LSB, as systemctl status)."""
    try:
        found = Client(directories().control_socket).status()
    except NotRunning as error:
        return CommandResult(
            {"running": False}, error.message, (error.hint or "",), error.exit_code
        )
    return CommandResult({"running": True, **found}, render(found))


def render(status: DaemonStatus) -> str:
    """Return the status as a person reads it."""
    stopping = ", stopping" if status["stopping"] else ""
    head = (
        f"llama-corral {status['version']} · pid {status['pid']} · up {duration(status['up_s'])}"
        f"{stopping}\n{status['url']}/v1"
    )
    instances = [instance for model in status["models"] for instance in model["instances"]]
    troubles = [line for instance in instances for line in _troubles(instance)]
    rows = [_row(model, instance) for model in status["models"] for instance in model["instances"]]
    remarks = [*map(_wait, status["models"]), *map(_draft, instances)]
    asides = [
        *filter(None, remarks),
        *(f"\n{line}" for line in not_persisted_reasons(status["models"])),
    ]
    shown = [head, "", table(_HEAD, rows), *asides, *troubles]
    return "\n".join([*shown, *_nodes(status["nodes"])])


def _row(model: ModelStatus, instance: InstanceStatus) -> tuple[str, ...]:
    speed = instance["tokens_per_second"]
    return (
        instance["name"],
        _state(model, instance),
        str(instance["pid"] or "-"),
        f"{instance['slots_busy']}/{instance['slots']}",
        "-" if speed is None else f"{speed:.1f}",
        size(instance["memory_bytes"]),
        duration(instance["up_s"]),
        str(instance["restarts"]),
    )


def _wait(model: ModelStatus) -> str | None:
    """Return the line on what waits for a model's memory; None where nothing does."""
    found = model["waiting"]
    if found is None:
        return None
    who = f"{found['requests']} waiting" if found["requests"] else "a command is waiting"
    turn = f", turn {found['place']}" if found["place"] > 1 else ""
    leaving = f"; no new requests for {' and '.join(found['leaving'])}" if found["leaving"] else ""
    return f"\n{model['name']}: {who} for memory, {duration(found['wait_s'])} so far{turn}{leaving}"


def not_persisted_reasons(models: Iterable[ModelStatus]) -> list[str]:
    """Return a line for each model whose conversations do not outlive their engine."""
    return [
        f"{one['name']} keeps no conversations over restarts: {one['not_persisted_reason']}"
        for one in models
        if one["not_persisted_reason"]
    ]


def _draft(instance: InstanceStatus) -> str | None:
    draft = instance["draft"]
    if draft is None or draft["acceptance"] is None:
        return None
    accepted = f"accepts {draft['acceptance']:.0%} of {draft['drafted']} drafted tokens"
    return f"\n{instance['name']}: {accepted}"


def _nodes(nodes: list[NodeStatus]) -> list[str]:
    """Return the lines that show the other machines; none where there are none."""
    if not nodes:
        return []
    lines = [f"\n{one['name']}: {colored(one['reason'], 'red')}" for one in nodes if one["reason"]]
    return ["", table(_NODES_HEAD, [*map(_node_row, nodes)]), *lines]


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    slots = f"{node['slots_busy']}/{node['slots']}"
    return node["name"], node["state"], slots, node["url"], ", ".join(node["models"]) or "-"


def _state(model: ModelStatus, instance: InstanceStatus) -> str:
    if instance["state"] == "stopped" and model["state"] == "unloaded":
        # A request brings it up, other than one that was stopped.
        return "waiting" if model["waiting"] else "unloaded"
    if instance["state"] == "starting" and instance["progress"] is not None:
        return f"starting {instance['progress']:.0%}"
    if instance["retry_in_s"] is not None:
        return f"backoff {instance['retry_in_s']:.0f} s"
    return instance["state"]


def _troubles(instance: InstanceStatus) -> list[str]:
    lines = [f"\n{instance['name']}: {colored(text, 'yellow')}" for text in instance["warnings"]]
    if error := instance["error"]:
        lines.append(f"\n{instance['name']}: {colored(error['message'], 'red')}")
        lines += [f"  {label}: {error[label]}" for label in ("hint", "log") if error[label]]
    return lines
