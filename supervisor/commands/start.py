"""`corral start` and `corral restart`: bring models up, and show how that goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from supervisor.commands.stop import end_daemon
from supervisor.commands.targets import Targets, choose, resolve_running
from supervisor.control.client import Client
from supervisor.control.messages import (
    DaemonStatus,
    ErrorFields,
    InstanceStatus,
    ModelStatus,
    StreamMessage,
)
from supervisor.errors import (
    CorralError,
    DaemonBusy,
    Interrupted,
    NotRunning,
    OutOfMemory,
    StartFailed,
    from_json,
)
from supervisor.host.paths import Directories, directories, make_private
from supervisor.output import CommandResult, ProgressMeter
from supervisor.process.log_file import open_log

# Codes of causes that are the settings' own fault, found before anything was spawned, keep their
# exit code; whatever an engine ended with is a failed start.
_OWN_CODES: Final = frozenset(
    {"settings_invalid", "engine_missing", "engine_broken", "model_invalid"}
    | {"no_room", "state_denied"}
)
# How long a daemon may hold its lock before it answers, and how often to look.
_COMING_UP_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05


def start(
    words: Sequence[str], config: Path | None, listen: str | None, *, wait: bool
) -> CommandResult:
    """Bring models up; where no daemon runs, start one in the background first.

    A daemon that was started for this and brought nothing up is ended again.

    Raises:
        CorralError: A model did not come up; says why.
    """
    where = directories()
    client = Client(where.control_socket)
    try:
        names = resolve_running(words, client.status())
    except NotRunning:
        choice = choose(words, config, where, listen)
        try:
            _spawn_daemon(choice, listen, where)
        except DaemonBusy:
            names = resolve_running(words, _await_status(client))
        else:
            names = choice.names if words else ()  # those that come up with the daemon
            return _start_fresh(client, names, where, wait=wait)
    return _command(client, "start", names, wait=wait)


def restart(words: Sequence[str]) -> CommandResult:
    """Drain models and bring them up again.

    Raises:
        NotRunning: No daemon runs.
        CorralError: A model did not come up; says why.
    """
    client = Client(directories().control_socket)
    return _command(client, "restart", resolve_running(words, client.status()), wait=True)


def load(words: Sequence[str]) -> CommandResult:
    """Bring models into memory, others making room where that is needed.

    Raises:
        NotRunning: No daemon runs.
        CorralError: A model did not come up; says why.
    """
    client = Client(directories().control_socket)
    return _command(client, "load", resolve_running(words, client.status()), wait=True)


def _start_fresh(
    client: Client, names: Sequence[str], where: Directories, *, wait: bool
) -> CommandResult:
    try:
        return _command(client, "start", names, wait=wait)
    except Interrupted:
        raise
    except CorralError:
        if not any(instance["state"] == "ready" for instance in _instances(client.status(), ())):
            end_daemon(where)
        raise


def _await_status(client: Client) -> DaemonStatus:
    """Wait for a daemon that somebody else is starting at this moment.

    Raises:
        NotRunning: It does not answer in time.
    """
    give_up_at_s = time.monotonic() + _COMING_UP_S
    while True:
        try:
            return client.status()
        except NotRunning:
            if time.monotonic() > give_up_at_s:
                raise
            time.sleep(_LOOK_EVERY_S)


def _command(client: Client, verb: str, names: Sequence[str], *, wait: bool) -> CommandResult:
    lines = client.command(verb, names)
    if not wait:
        next(lines, None)
        status = client.status()
        return CommandResult(status, f"starting on {status['url']}/v1")
    status = watch(lines)
    models = [model for model in status["models"] if _is_meant(model, names)]
    for model in models:
        if model["state"] == "failed" and model["reason"] and not _error(model):
            raise OutOfMemory(f"{model['name']} did not start: {model['reason']}")
    instances = [one for model in models for one in model["instances"] if not one["leaving"]]
    for instance in instances:
        if instance["state"] != "ready":
            raise _failure(instance)
    ready = "\n".join(f"ready: {instance['name']}" for instance in instances)
    return CommandResult(status, f"{ready}\n{status['url']}/v1")


def _instances(status: DaemonStatus, names: Sequence[str]) -> list[InstanceStatus]:
    """Return the instances of the named models, or of all, those that leave left out."""
    chosen = (model for model in status["models"] if not names or model["name"] in names)
    return [one for model in chosen for one in model["instances"] if not one["leaving"]]


def _is_meant(model: ModelStatus, names: Sequence[str]) -> bool:
    """Return whether a command was about a model; without names, not those that wait for calls."""
    return model["name"] in names if names else model["state"] != "unloaded"


def _error(model: ModelStatus) -> ErrorFields | None:
    return next((one["error"] for one in model["instances"] if one["error"]), None)


def watch(lines: Iterable[StreamMessage]) -> DaemonStatus:
    """Show the progress that lines tell of, and return the status at their end.

    Raises:
        DaemonBusy: They ended without one.
    """
    return last_of(lines)["done"]


def last_of(lines: Iterable[StreamMessage]) -> StreamMessage:
    """Show the progress that lines tell of, and return the one that ends them.

    Raises:
        DaemonBusy: They ended without one.
        Interrupted: Ctrl-C; what was begun goes on.
    """
    meter = ProgressMeter()
    try:
        for line in lines:
            if "done" in line or "reloaded" in line:
                return line
            if "event" in line and line["event"]["name"] == "instance.load_progress":
                fields = line["event"]["fields"]
                meter.show(f"loading {fields['instance']}", float(str(fields["value"])))
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            "no longer waiting; what was begun goes on",
            hint="corral status shows it, corral stop ends it",
        ) from interrupt
    finally:
        meter.clear()
    raise DaemonBusy("the daemon ended before it was done", hint="corral logs shows why")


def _failure(instance: InstanceStatus) -> CorralError:
    error = instance["error"]
    if error is None:
        return StartFailed(
            f"{instance['name']} is {instance['state']}",
            hint="it was stopped or unloaded meanwhile" if instance["state"] == "stopped" else None,
            log=instance["log"],
        )
    told = from_json({**error, "message": f"{instance['name']} did not start: {error['message']}"})
    if error["code"] in _OWN_CODES:
        return told
    return StartFailed(told.message, hint=told.hint, log=told.log)


def _spawn_daemon(choice: Targets, listen: str | None, where: Directories) -> None:
    """Start `corral serve` in a session of its own and wait until it answers.

    Raises:
        CorralError: What the daemon met, or that it died without a word.
    """
    make_private(where.log)
    output = open_log(where.daemon_log)
    reader, writer = os.pipe()
    try:
        words = _daemon_words(choice, listen, writer)
        subprocess.Popen(  # it outlives us by design
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[writer],
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(output)
        os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as reports:
        report = reports.readline()
    if not report:
        raise StartFailed("the daemon ended before it answered", log=str(where.daemon_log))
    if told := json.loads(report).get("error"):
        raise from_json(told)


def _daemon_words(choice: Targets, listen: str | None, report_fd: int) -> list[str]:
    words = [sys.executable, "-m", "supervisor.cli", "serve", *choice.words]
    if choice.loaded.path:
        words += ["--config", str(choice.loaded.path)]
    if listen:
        words += ["--listen", listen]
    return [*words, "--report-fd", str(report_fd)]
