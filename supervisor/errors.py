"""Errors of the commands, with the exit code of each.

    CorralError                       1    something failed
    ├── SettingsInvalid              78    corral.toml, a profile or a flag is wrong
    ├── EngineMissing                78    no llama-server at its path or in the usual places
    ├── EngineBroken                 78    a file is there, but it does not run
    ├── EngineInUse                   1    a build that is in use cannot be removed
    ├── EnginesBusy                  69    another command changes the installed builds
    ├── ModelInvalid                 78    the GGUF is missing, truncated, or not a GGUF
    ├── OutOfMemory                  78    a model can never fit into this machine's memory
    ├── DeviceMemoryShort             1    other programs hold the device memory that a model needs
    ├── StartFailed                   1    an engine started and did not become ready
    ├── EngineFailed                  1    an engine ended while it was measured
    ├── WorkerUnreachable             1    an RPC worker does not answer
    ├── WorkerMismatch               78    an RPC worker speaks another version of the protocol
    ├── WorkerFailed                  1    an RPC worker that was started here does not listen
    ├── DownloadFailed                1    a file could not be fetched or verified
    ├── HubAccessDenied               1    the hub wants a token, or conditions to be accepted
    ├── CaptureInvalid               78    a file is no capture, or nothing in it can be played
    ├── DiskFull                      1    a file does not fit on its disk
    ├── AccessDenied                  1    a directory, socket or log cannot be used
    ├── ServiceFailed                 1    systemd refuses, or does not run here
    ├── NotRunning                    3    the daemon is not running
    ├── NoSuchModel                   4    no model of that name
    ├── NoSuchRequest                 4    no request of that id
    ├── NoSuchConversation            4    no conversation of that name or request
    ├── HistoryUnavailable            1    figures of past requests are not kept, or not readable
    ├── ModelKept                     1    another program keeps that model
    ├── ModelInUse                   69    an engine serves the model that is to be removed
    ├── NotConfirmed                  2    the user cannot be asked, and --yes was not given
    ├── DaemonBusy                   69    another daemon holds the directory, or ours hangs
    ├── DaemonStopping               69    the daemon is ending, and takes no new desktop host
    ├── DaemonExited                  1    the daemon ended without being told to
    ├── MachineBusy                  69    other programs take what a measurement needs
    └── Interrupted                 130    Ctrl-C; the daemon continues

0 is success, 2 a usage error. 78 is EX_CONFIG: a service manager must not restart the daemon
(systemd: RestartPreventExitStatus=78). 3 is what `systemctl status` returns for a stopped unit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, TypedDict

_WORD_MAX: Final = 120


class ErrorFields(TypedDict):
    """An error in JSON; see CorralError."""

    code: str
    message: str
    hint: str | None
    log: str | None


class CorralError(Exception):
    """An error that a command shows.

    Attributes:
        code: Stable name in snake case, for scripts.
        message: What happened, to what. One sentence without a full stop, or a few lines.
        hint: What to do next, or None if the message says it.
        log: Path of the log to read, or None.
    """

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None, log: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def as_json(self) -> ErrorFields:
        return {"code": self.code, "message": self.message, "hint": self.hint, "log": self.log}


class SettingsInvalid(CorralError):
    code = "settings_invalid"
    exit_code = 78


class EngineMissing(CorralError):
    code = "engine_missing"
    exit_code = 78


class EngineBroken(CorralError):
    code = "engine_broken"
    exit_code = 78


class EngineInUse(CorralError):
    code = "engine_in_use"


class EnginesBusy(CorralError):
    code = "engines_busy"
    exit_code = 69


class ModelInvalid(CorralError):
    code = "model_invalid"
    exit_code = 78


class OutOfMemory(CorralError):
    code = "no_room"
    exit_code = 78


class DeviceMemoryShort(CorralError):
    code = "device_memory_short"


class StartFailed(CorralError):
    code = "start_failed"


class EngineFailed(CorralError):
    code = "engine_failed"


class WorkerUnreachable(CorralError):
    code = "worker_unreachable"


class WorkerMismatch(CorralError):
    code = "worker_mismatch"
    exit_code = 78


class WorkerFailed(CorralError):
    code = "worker_failed"


class DownloadFailed(CorralError):
    code = "download_failed"


class HubAccessDenied(CorralError):
    code = "hub_access_denied"


class CaptureInvalid(CorralError):
    code = "capture_invalid"
    exit_code = 78


class DiskFull(CorralError):
    code = "disk_full"


class AccessDenied(CorralError):
    code = "state_denied"


class ServiceFailed(CorralError):
    code = "service_failed"


class NotRunning(CorralError):
    code = "not_running"
    exit_code = 3


class NoSuchModel(CorralError):
    code = "no_such_model"
    exit_code = 4


class NoSuchRequest(CorralError):
    code = "no_such_request"
    exit_code = 4


class NoSuchConversation(CorralError):
    code = "no_such_conversation"
    exit_code = 4


class HistoryUnavailable(CorralError):
    code = "history_unavailable"


class ModelKept(CorralError):
    code = "model_kept"


class ModelInUse(CorralError):
    code = "model_in_use"
    exit_code = 69


class NotConfirmed(CorralError):
    code = "not_confirmed"
    exit_code = 2


class DaemonBusy(CorralError):
    code = "daemon_busy"
    exit_code = 69


class DaemonStopping(CorralError):
    code = "daemon_stopping"
    exit_code = 69


class DaemonExited(CorralError):
    code = "daemon_exited_error"


class MachineBusy(CorralError):
    code = "machine_busy"
    exit_code = 69


class Interrupted(CorralError):
    code = "interrupted"
    exit_code = 130


@contextmanager
def access_denied(failure: str, hint: str | None = None) -> Iterator[None]:
    """Raise AccessDenied for an OSError of the block; `failure` says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise AccessDenied(f"{failure}: {error.strerror or error}", hint=hint) from error


def join_errors(errors: Sequence[CorralError]) -> CorralError:
    """Return an error with all messages, and the hint and log of the first error."""
    lines = dict.fromkeys(error.message for error in errors)
    return from_json({**errors[0].as_json(), "message": "\n".join(lines)})


def from_json(fields: Mapping[str, Any]) -> CorralError:
    """Restore an error, with its class, from the result of `as_json`."""
    known = {kind.code: kind for kind in CorralError.__subclasses__()}
    kind = known.get(fields.get("code") or "", CorralError)
    return kind(fields.get("message") or "", hint=fields.get("hint"), log=fields.get("log"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the nearest known name, or nothing if none is near."""
    near = difflib.get_close_matches(word, known, n=1) if len(word) <= _WORD_MAX else []
    return f"; did you mean {near[0]}?" if near else ""
