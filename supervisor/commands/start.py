"""`corral start`, `restart` and `load`: bring models up, and show the progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from supervisor.commands.spawn_daemon import settings_options, spawn_daemon
from supervisor.commands.status import reductions
from supervisor.commands.stop import stop_daemon
from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, InstanceStatus, ModelStatus
from supervisor.control.running import last_message, resolve_running
from supervisor.control.state_text import keyless_warning
from supervisor.errors import (
    CorralError,
    DaemonBusy,
    Interrupted,
    NotRunning,
    OutOfMemory,
    StartFailed,
    WorkerUnreachable,
    from_json,
)
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult

# Causes that lie in the settings and are found before a spawn keep their own exit code; any other
# end of an engine is a failed start.
_SETTINGS_CODES: Final = frozenset(
    {"settings_invalid", "engine_missing", "engine_broken", "model_invalid"}
    | {"no_room", "state_denied", "worker_mismatch"}
)
# How long a daemon may hold its lock before it answers, and how often to ask.
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05


def start(
    words: Sequence[str], config: Path | None, listen: str | None, *, wait: bool
) -> CommandResult:
    """Start models, in a new background daemon if none runs.

    It stops if no model gets ready, or will when an RPC worker answers.
    """
    where = directories()
    client = Client(where.control_socket)
    try:
        names = resolve_running(words, client.status())
    except NotRunning:
        try:
            names = spawn_daemon(words, settings_options(config, listen), where)
        except DaemonBusy:
            names = resolve_running(words, _await_status(client))
        else:
            return _start_first(client, names, where, wait=wait)
    return _command(client, "start", names, wait=wait)


def restart(words: Sequence[str]) -> CommandResult:
    return _command_running("restart", words)


def load(words: Sequence[str]) -> CommandResult:
    return _command_running("load", words)


def _command_running(verb: str, words: Sequence[str]) -> CommandResult:
    client = Client(directories().control_socket)
    return _command(client, verb, resolve_running(words, client.status()), wait=True)


def _start_first(
    client: Client, names: Sequence[str], where: Directories, *, wait: bool
) -> CommandResult:
    try:
        return _command(client, "start", names, wait=wait)
    except Interrupted:
        raise
    except CorralError:
        instances = [one for model in client.status()["models"] for one in _instances(model)]
        if not any(one["state"] == "ready" or _waits_for_worker(one) for one in instances):
            stop_daemon(where)
        raise


def _await_status(client: Client) -> DaemonStatus:
    """Wait for a daemon that another process is just starting."""
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
    while True:
        try:
            return client.status()
        except NotRunning:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)


def _command(client: Client, verb: str, names: Sequence[str], *, wait: bool) -> CommandResult:
    messages = client.command(verb, names)
    if not wait:
        next(messages, None)
        status = client.status()
        return CommandResult(status, f"starting on {status['url']}/v1", keyless_warning(status))
    status = last_message(messages)["done"]
    ready = [
        name for model in status["models"] if _is_meant(model, names) for name in _ready(model)
    ]
    given_up = [
        line for model in status["models"] if _is_meant(model, names) for line in reductions(model)
    ]
    text = "\n".join([*(f"ready: {name}" for name in ready), f"{status['url']}/v1"])
    return CommandResult(status, text, (*given_up, *keyless_warning(status)))


def _is_meant(model: ModelStatus, names: Sequence[str]) -> bool:
    # Without names, a command is about all models but those that load on request.
    return model["name"] in names if names else model["state"] != "unloaded"


def _instances(model: ModelStatus) -> list[InstanceStatus]:
    return [one for one in model["instances"] if not one["retiring"]]


def _ready(model: ModelStatus) -> list[str]:
    has_error = any(one["error"] for one in model["instances"])
    if model["state"] == "failed" and model["reason"] and not has_error:
        raise OutOfMemory(f"{model['name']} did not start: {model['reason']}")
    for instance in _instances(model):
        if instance["state"] != "ready":
            raise _failure(instance)
    return [instance["name"] for instance in _instances(model)]


def _waits_for_worker(instance: InstanceStatus) -> bool:
    """Return whether it starts as soon as an RPC worker answers."""
    error = instance["error"]
    is_away = error is not None and error["code"] == WorkerUnreachable.code
    return is_away and instance["state"] != "failed"


def _failure(instance: InstanceStatus) -> CorralError:
    error = instance["error"]
    if error is None:
        return StartFailed(
            f"{instance['name']} is {instance['state']}",
            hint="it was stopped or unloaded meanwhile" if instance["state"] == "stopped" else None,
            log=instance["log"],
        )
    message = f"{instance['name']} did not start: {error['message']}"
    if error["code"] in _SETTINGS_CODES:
        return from_json({**error, "message": message})
    hint = error["hint"]
    if _waits_for_worker(instance):
        hint = f"{hint}; {instance['name']} starts when it answers, corral stop ends the wait"
    return StartFailed(message, hint=hint, log=error["log"])
