"""Errors of the commands, with the exit code of each.

0 is success, 2 a usage error. 78 is EX_CONFIG: a service manager must not restart the daemon
(systemd: RestartPreventExitStatus=78). 3 is the exit code of `systemctl status` for a stopped unit.
"""

from __future__ import annotations

import difflib
import re
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

    def __init_subclass__(cls, *, exit_code: int = 1, code: str = "") -> None:
        """Set both; without `code`, it is the name of the class, such as `engine_missing`."""
        cls.code = code or re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).lower()
        cls.exit_code = exit_code

    def __init__(self, message: str, hint: str | None = None, log: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def as_json(self) -> ErrorFields:
        return {"code": self.code, "message": self.message, "hint": self.hint, "log": self.log}


class SettingsInvalid(CorralError, exit_code=78):
    """The settings file, a profile or a flag is wrong."""


class EngineMissing(CorralError, exit_code=78):
    """No llama-server at its path or in the usual places."""


class EngineBroken(CorralError, exit_code=78):
    """A file is there, but it does not run."""


class EngineInUse(CorralError):
    """A build that is in use cannot be removed."""


class EnginesBusy(CorralError, exit_code=69):
    """Another command changes the installed builds."""


class ModelInvalid(CorralError, exit_code=78):
    """The GGUF is missing, truncated, or not a GGUF."""


class OutOfMemory(CorralError, exit_code=78, code="no_room"):
    """A model can never fit into this machine's memory."""


class DeviceMemoryShort(CorralError):
    """Other programs hold the device memory that a model needs."""


class StartFailed(CorralError):
    """An engine started and did not become ready."""


class EngineFailed(CorralError):
    """An engine ended while it was measured."""


class WorkerUnreachable(CorralError):
    """An RPC worker does not answer."""


class WorkerMismatch(CorralError, exit_code=78):
    """An RPC worker speaks another version of the protocol."""


class WorkerFailed(CorralError):
    """An RPC worker that was started here does not listen."""


class DownloadFailed(CorralError):
    """A file could not be fetched or verified."""


class HubAccessDenied(CorralError):
    """The hub wants a token, or conditions to be accepted."""


class CaptureInvalid(CorralError, exit_code=78):
    """A file is no capture, or nothing in it can be played."""


class DiskFull(CorralError):
    """A file does not fit on its disk."""


class SaveFailed(CorralError):
    """Some idle slots were not saved."""


class AccessDenied(CorralError, code="state_denied"):
    """A directory, socket or log cannot be used."""


class ServiceFailed(CorralError):
    """The service manager refuses, or does not run here."""


class NotRunning(CorralError, exit_code=3):
    """The daemon is not running."""


class NoSuchModel(CorralError, exit_code=4):
    """No model of that name."""


class NoSuchRequest(CorralError, exit_code=4):
    """No request of that id."""


class NoSuchConversation(CorralError, exit_code=4):
    """No conversation of that name or request."""


class HistoryUnavailable(CorralError):
    """Figures of past requests are not kept, or not readable."""


class ModelKept(CorralError):
    """Another program keeps that model."""


class ModelInUse(CorralError, exit_code=69):
    """An engine serves the model that is to be removed."""


class NotConfirmed(CorralError, exit_code=2):
    """The user cannot be asked, and --yes was not given."""


class DaemonBusy(CorralError, exit_code=69):
    """Another daemon holds the directory, or ours hangs."""


class DaemonStopping(CorralError, exit_code=69):
    """The daemon is ending, and takes no new desktop host."""


class DaemonExited(CorralError, code="daemon_exited_error"):
    """The daemon ended without being told to."""


class MachineBusy(CorralError, exit_code=69):
    """Other programs take the resources that a measurement needs."""


class Interrupted(CorralError, exit_code=130):
    """Ctrl-C; the daemon continues."""


@contextmanager
def access_denied(failure: str, hint: str | None = None) -> Iterator[None]:
    """Raise AccessDenied for an OSError of the block; `failure` names the failed action."""
    try:
        yield
    except OSError as error:
        raise AccessDenied(f"{failure}: {error.strerror or error}", hint=hint) from error


def join_errors(errors: Sequence[CorralError]) -> CorralError:
    """Return an error with all messages, and the log of the first error.

    Each message has its own hint, unless all hints are the same.
    """
    hints = {error.hint for error in errors}
    lines = dict.fromkeys(
        f"{error.message} ({error.hint})" if error.hint and len(hints) > 1 else error.message
        for error in errors
    )
    hint = errors[0].hint if len(hints) == 1 else None
    return from_json({**errors[0].as_json(), "message": "\n".join(lines), "hint": hint})


def error_of(subject: str, error: CorralError) -> CorralError:
    """Return an error whose message begins with its subject, such as a model."""
    return from_json({**error.as_json(), "message": f"{subject}: {error.message}"})


def from_json(fields: Mapping[str, Any]) -> CorralError:
    """Restore an error, with its class, from the result of `as_json`."""
    known = {kind.code: kind for kind in CorralError.__subclasses__()}
    kind = known.get(fields.get("code") or "", CorralError)
    return kind(fields.get("message") or "", hint=fields.get("hint"), log=fields.get("log"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the nearest known name, or nothing if none is near."""
    near = difflib.get_close_matches(word, known, n=1) if len(word) <= _WORD_MAX else []
    return f"; did you mean {near[0]}?" if near else ""
