"""`corral capture`: the requests to a model with their responses, in a file."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import capture_text
from supervisor.daemon.model_commands import resolve_running
from supervisor.errors import AccessDenied, CorralError, DaemonBusy, DiskFull
from supervisor.output import CommandResult, ProgressMeter, size
from supervisor.system.paths import directories, file_name

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CaptureFile:
    """A new file of mode 0600. Each line is written whole, or, on a full disk, not at all.

    Attributes:
        end: The members of the last line; None before it.
    """

    def __init__(self, path: Path) -> None:
        """Create the file; raises AccessDenied where that cannot be or something is there."""
        self.path = path.absolute()
        self.size_bytes = self.requests = self.responses = 0
        self.end: dict[str, Any] | None = None
        self._began_at_s = time.monotonic()
        try:
            self._descriptor = os.open(self.path, _FLAGS, 0o600)
        except FileExistsError as error:
            raise AccessDenied(
                f"{self.path} is there already", hint="name another file with --output"
            ) from error
        except (OSError, ValueError) as error:
            raise AccessDenied(
                f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}",
                hint="name a file in a directory that exists and is yours to write",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_at_s

    def write(self, line: bytes) -> None:
        """Append a line; an empty one only says that the daemon is there. Raises OSError."""
        if line == b"\n":
            return
        self._append(line)
        self.size_bytes += len(line)
        self.requests += line.startswith(b'{"type":"request"')
        self.responses += line.startswith(b'{"type":"response"')
        if line.startswith(b'{"type":"end"'):
            self.end = json.loads(line)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise


_REASONS = {
    "time": "its time is over",
    "requests": "it has as many requests as were wanted",
    "size": "it has its full size",
    "stopped": "it was stopped",
    "daemon_stopped": "the daemon stopped",
}
_CONTENT = "it contains prompts and answers; keys are taken out"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """`output` None: a new file in this directory, named after the model and the time."""

    model: str
    duration_s: float
    size_bytes: int
    requests: int | None
    output: Path | None


def capture(options: CaptureOptions) -> CommandResult:
    """Capture until a limit, Ctrl-C, or the end of the daemon."""
    client = Client(directories().control_socket)
    (model,) = resolve_running([options.model], client.status())
    body = {
        "model": model,
        "duration_s": options.duration_s,
        "size_bytes": options.size_bytes,
        "requests": options.requests,
    }
    file = CaptureFile(
        options.output
        or Path(f"{file_name(model)}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.capture.jsonl")
    )
    try:
        with file, _stopped_by_signals(client.stop_capture):
            _fill(file, client, body, options.duration_s)
    except OSError as error:
        if not file.requests:
            file.remove()
        raise DiskFull(
            f"cannot write {file.path}: {error.strerror}",
            hint=f"it has {file.requests} requests, whole up to its last line"
            if file.requests
            else "name a file on another disk with --output",
        ) from error
    except CorralError:
        if not file.size_bytes:
            file.remove()
        raise
    return _result(file)


def show() -> CommandResult:
    """Show the capture that runs, if one does."""
    running = Client(directories().control_socket).status()["capture"]
    text = capture_text(running) if running else "nothing is captured"
    return CommandResult(running, text)


def stop() -> CommandResult:
    """End the capture that runs; its command has the file."""
    client = Client(directories().control_socket)
    running = client.status()["capture"]
    client.stop_capture()
    return CommandResult(running, "stopped the capture" if running else "nothing is captured")


def _fill(file: CaptureFile, client: Client, body: dict[str, Any], duration_s: float) -> None:
    meter = ProgressMeter()
    try:
        for line in client.capture(body):
            file.write(line)
            done = min(1.0, file.age_s / duration_s)
            meter.show("capturing", done, f"{file.requests} requests, {size(file.size_bytes)}")
    except DaemonBusy:
        if not file.size_bytes:
            raise  # it never began; else the daemon ended in the middle of it
    finally:
        meter.clear()


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """End the capture on the first Ctrl-C or SIGTERM, without losing a line; the second ends all.

    A KeyboardInterrupt would lose what is half read.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        with suppress(CorralError):
            stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _result(file: CaptureFile) -> CommandResult:
    end = file.end
    dropped = int(end["dropped"]) if end else 0
    data = {
        "path": str(file.path),
        "requests": file.requests,
        "responses": file.responses,
        "dropped": dropped,
        "size_bytes": file.size_bytes,
        "reason": end["reason"] if end else "daemon_lost",
    }
    why = _REASONS.get(str(end["reason"]), "it ended") if end else "the daemon ended suddenly"
    noun = "request" if file.requests == 1 else "requests"
    text = (
        f"captured {file.requests} {noun}, {file.responses} answered, {size(file.size_bytes)}; "
        f"{why}\n{file.path}"
    )
    lost = [f"{dropped} requests or responses were dropped"] if dropped else []
    return CommandResult(data, text, (*lost, _CONTENT), exit_code=0 if end else 1)
