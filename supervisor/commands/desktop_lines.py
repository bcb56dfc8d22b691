"""The lines that `corral serve --desktop` writes for its host; `docs/desktop.md` has their members.

Source: https://jsonlines.org, one JSON object a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from supervisor.control.messages import DaemonStatus, EventLine, InstanceStatus, JoinedHost
from supervisor.errors import CorralError

SCHEMA: Final = 1
Line = dict[str, object]

# Events that are errors without a code of their own.
_ERROR_CODES: Final[Mapping[str, str]] = {
    "model.load_refused": "load_refused",
    "worker.failed": "worker_failed",
    "settings.rejected": "settings_invalid",
    "task.failed": "internal_error",
}


def ready_line(joined: JoinedHost, requested: Sequence[str], log: str, *, attached: bool) -> Line:
    """`requested`: the names of the models that the host's words mean."""
    status = joined["status"]
    return {
        "event": "ready",
        "schema": SCHEMA,
        "url": status["url"],
        "pid": status["pid"],
        "version": status["version"],
        "api_key_file": joined["api_key_file"],
        "tls_cert": status["tls_cert"],
        "attached": attached,
        "models": [model["name"] for model in status["models"]],
        "requested": list(requested),
        "log": log,
    }


def state_lines(status: DaemonStatus) -> Iterator[Line]:
    """The state of each instance now, and why those that do not run have failed."""
    for model in status["models"]:
        for instance in model["instances"]:
            yield from _instance_lines(model["name"], instance)


def _instance_lines(model: str, instance: InstanceStatus) -> Iterator[Line]:
    names = {"model": model, "instance": instance["name"]}
    error = instance["error"]
    yield {"event": "state", **names, "state": instance["state"], "reason": error and error["code"]}
    if error:
        yield {"event": "error", **error, **names}


def event_lines(event: EventLine) -> Iterator[Line]:
    """What a host is told of an event of the daemon: at most one line."""
    fields: Mapping[str, Any] = event["fields"]
    match event["name"]:
        case "instance.state_changed":
            names = {name: fields[name] for name in ("model", "instance")}
            yield {"event": "state", **names, "state": fields["after"], "reason": fields["reason"]}
        case "instance.load_progress":
            members = {name: fields[name] for name in ("model", "instance", "stage", "value")}
            yield {"event": "progress", **members}
        case "instance.failed":
            yield _error(fields["code"], fields)
        case "daemon.stopping":
            yield {"event": "stopping", "reason": fields["reason"]}
        case "events.dropped":
            yield missed_line(fields["count"])
        case name if name in _ERROR_CODES:
            yield _error(_ERROR_CODES[name], fields)


def _error(code: str, fields: Mapping[str, Any]) -> Line:
    return {
        "event": "error",
        "code": code,
        "message": fields.get("reason") or fields.get("error"),
        "hint": fields.get("hint"),
        "log": fields.get("log"),
        **{name: fields[name] for name in ("model", "instance") if name in fields},
    }


def error_line(error: CorralError) -> Line:
    return {"event": "error", **error.as_json()}


def missed_line(count: int) -> Line:
    return {"event": "missed", "count": count}


def stopped_line(*, is_daemon_running: bool) -> Line:
    return {"event": "stopped", "daemon_running": is_daemon_running}
