"""Every error a user can meet, and the exit code it ends a command with.

    CorralError                       1    something failed
    ├── SettingsInvalid              78    corral.toml, a profile or a flag is wrong
    ├── EngineMissing                78    no llama-server where one was named or looked for
    ├── EngineBroken                 78    a file is there, but it does not run
    ├── ModelInvalid                 78    the GGUF is missing, cut short, or no GGUF
    ├── OutOfMemory                       78    a model can never fit into this machine's memory
    ├── StartFailed                   1    an engine was spawned and did not become ready
    ├── DownloadFailed                1    a pinned file could not be fetched or verified
    ├── AccessDenied                   1    a directory, socket or log cannot be used
    ├── NotRunning                    3    the daemon is down
    ├── NoSuchModel                   4    no model of that name
    ├── DaemonBusy                   69    another daemon holds the directory, or ours is mute
    └── Interrupted                 130    Ctrl-C, while something was under way that goes on

78 is EX_CONFIG: a service manager must not restart what cannot work
(systemd: RestartPreventExitStatus=78). 3 is what `systemctl status` says of a stopped unit.
Commands also end with 0 (done) and 2 (wrong words on the command line).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class CorralError(Exception):
    """Something failed, and this says what, and what to do next.

    Attributes:
        code: Stable name in snake case, for scripts and the JSON envelope.
        exit_code: What a command that meets this error exits with.
        message: What happened, to what. One sentence without a full stop, or a few lines.
        hint: What to do next, or None where the message already says it.
        log: Path of the log to read, or None.
    """

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None, log: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def as_json(self) -> dict[str, str | None]:
        """Return the error as the JSON envelope and the control API carry it."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "log": self.log}


class SettingsInvalid(CorralError):
    """`corral.toml`, a profile or a flag is wrong."""

    code = "settings_invalid"
    exit_code = 78


class EngineMissing(CorralError):
    """No llama-server where one was named or looked for."""

    code = "engine_missing"
    exit_code = 78


class EngineBroken(CorralError):
    """The engine's file is there, but it does not run."""

    code = "engine_broken"
    exit_code = 78


class ModelInvalid(CorralError):
    """The model's file is missing, cut short, a later shard, or no GGUF."""

    code = "model_invalid"
    exit_code = 78


class OutOfMemory(CorralError):
    """A model can never fit into the memory that models may take here."""

    code = "no_room"
    exit_code = 78


class StartFailed(CorralError):
    """An engine was spawned and did not become ready."""

    code = "start_failed"


class DownloadFailed(CorralError):
    """A pinned file could not be fetched or verified."""

    code = "download_failed"


class AccessDenied(CorralError):
    """A directory, socket or log of ours cannot be used."""

    code = "state_denied"


class NotRunning(CorralError):
    """The daemon is down."""

    code = "not_running"
    exit_code = 3


class NoSuchModel(CorralError):
    """No model of that name is configured."""

    code = "no_such_model"
    exit_code = 4


class DaemonBusy(CorralError):
    """Another daemon owns the runtime directory, or ours does not answer."""

    code = "daemon_busy"
    exit_code = 69


class Interrupted(CorralError):
    """Ctrl-C, while something was under way that goes on."""

    code = "interrupted"
    exit_code = 130


def from_json(fields: Mapping[str, Any]) -> CorralError:
    """Return the error that `as_json` was called on, of the same class."""
    known = {kind.code: kind for kind in CorralError.__subclasses__()}
    kind = known.get(fields.get("code") or "", CorralError)
    return kind(fields.get("message") or "", hint=fields.get("hint"), log=fields.get("log"))
