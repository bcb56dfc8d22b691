"""`corral start`, `restart` and `load`: bring models up, and show the progress."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from supervisor.commands.spawn_daemon import settings_options, spawn_daemon
from supervisor.commands.status import reductions
from supervisor.commands.stop import stop_daemon
from supervisor.commands.targets import additional_models
from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, InstanceStatus, ModelStatus
from supervisor.control.running import last_message, resolve_running, unknown_words
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
from supervisor.output import CommandResult, describe

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
    """Start models, in a new background daemon if none runs; a running one gets those it lacks.

    Raises DaemonBusy if that one has another settings file, or listens elsewhere, than is asked.
    A new daemon stops if no model gets ready, or will when an RPC worker answers.
    """
    where = directories()
    client = Client(where.control_socket)
    try:
        status = client.status()
    except NotRunning:
        try:
            names = spawn_daemon(words, settings_options(config, listen), where)
        except DaemonBusy:
            status = _await_status(client)
        else:
            return _start_first(client, names, where, wait=wait)
    _check_same(status, config, listen)
    return _command_adding(client, "start", words, status, wait=wait)


def _check_same(status: DaemonStatus, config: Path | None, listen: str | None) -> None:
    """Check that the running daemon has what the command line asks for; raises DaemonBusy."""
    wrong = []
    used = status["config"]
    if config and (used is None or Path(used).resolve() != config.resolve()):
        wrong.append(f"has the settings of {used or 'no file'}, not of {config.resolve()}")
    listens = status.get("listen", listen)  # a daemon from before an upgrade says none
    if listen and listen not in {listens, urlsplit(status["url"]).netloc}:
        wrong.append(f"listens on {listens}, not on {listen}")
    if wrong:
        raise DaemonBusy(
            f"the running daemon (pid {status['pid']}) {' and '.join(wrong)}",
            hint="corral stop ends it, and corral start starts one with these; or leave them out",
        )


def restart(words: Sequence[str]) -> CommandResult:
    client = Client(directories().control_socket)
    return _command(client, "restart", resolve_running(words, client.status()), wait=True)


def load(words: Sequence[str]) -> CommandResult:
    client = Client(directories().control_socket)
    return _command_adding(client, "load", words, client.status(), wait=True)


def _command_adding(
    client: Client, verb: str, words: Sequence[str], status: DaemonStatus, *, wait: bool
) -> CommandResult:
    """Run a command on models, of which the daemon gets those that it does not have."""
    added: Mapping[str, Mapping[str, Any]] = {}
    if unknown := unknown_words(words, status):
        added = additional_models(unknown, status, directories())
        last_message(client.add_models(added))
        status = client.status()
    result = _command(client, verb, resolve_running(words, status), wait=wait)
    notes = tuple(_keeping_note(name, table["path"]) for name, table in added.items())
    return replace(result, notes=(*result.notes, *notes))


def _keeping_note(name: str, path: str) -> str:
    # It imports tomlkit, which takes 30 ms.
    from supervisor.settings.change import key_text

    words = ["corral", "config", "set", key_text(["models", name, "path"]), path]
    return f"{name} is served until the daemon stops; to keep it: {shlex.join(words)}"


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
    meant = [model for model in status["models"] if _is_meant(model, names)]
    notes = [line for model in meant for line in reductions(model)]
    notes += [
        f"{instance['name']}: {text}"
        for model in meant
        for instance in _instances(model)
        for text in instance["warnings"]
    ]
    ready: list[str] = []
    failures: list[CorralError] = []
    for model in meant:
        try:
            ready += _ready(model)
        except CorralError as error:
            failures.append(error)
    if failures and not ready:
        raise _joined(failures)
    failed = [describe(error, sys.stdout, "failed") for error in failures]
    text = "\n".join([*(f"ready: {name}" for name in ready), *failed, f"{status['url']}/v1"])
    return CommandResult(status, text, (*notes, *keyless_warning(status)), 1 if failures else 0)


def _joined(failures: Sequence[CorralError]) -> CorralError:
    """Return one error that tells of all; its hint and log are those of the first."""
    fields = failures[0].as_json()
    lines = dict.fromkeys(failure.message for failure in failures)
    return from_json({**fields, "message": "\n".join(lines)})


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
