"""Implements `corral capture`: writes the requests to a model and their responses to a file."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import capture_text
from supervisor.daemon.model_commands import resolve_running
from supervisor.errors import AccessDenied, CorralError, DaemonBusy, DiskFull
from supervisor.experiments.capture_lines import CaptureLimits
from supervisor.output import CommandResult, ProgressMeter, size
from supervisor.system.paths import directories, file_name

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CaptureFile:
    """A new file of mode 0600; raises AccessDenied if it exists or cannot be created.

    Each line is written whole, or, if the disk is full, not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.size_bytes = self.requests = self.responses = 0
        self.end: dict[str, Any] | None = None  # the members of the last line; None before it
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
        """Append a line, unless it is empty (a ping of the daemon). Raises OSError."""
        if line == b"\n":
            return
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += len(line)
        self.requests += line.startswith(b'{"type":"request"')
        self.responses += line.startswith(b'{"type":"response"')
        if line.startswith(b'{"type":"end"'):
            self.end = json.loads(line)


_REASONS = {
    "time": "its time is over",
    "requests": "it has reached the limit of requests",
    "size": "it has reached the limit of its size",
    "stopped": "it was stopped",
    "daemon_stopped": "the daemon stopped",
}
_CONTENT = "it contains prompts and answers, but no keys"


def capture(word: str, limits: CaptureLimits, output: Path | None) -> CommandResult:
    """Capture until a limit, Ctrl-C, or the end of the daemon.

    `output`: None for a new file in this directory, named after the model and the time.
    """
    client = Client(directories().control_socket)
    (model,) = resolve_running([word], client.status())
    body = {"model": model, **asdict(limits)}
    now = datetime.now().astimezone()
    file = CaptureFile(output or Path(f"{file_name(model)}-{now:%Y%m%d-%H%M%S}.capture.jsonl"))
    try:
        with file, _stop_on_signals(client.stop_capture):
            _fill(file, client, body, limits.duration_s)
    except OSError as error:
        if not file.requests:
            file.path.unlink(missing_ok=True)
        hint = "name a file on another disk with --output"
        if file.requests:
            hint = f"it has {file.requests} requests, complete up to its last line"
        raise DiskFull(f"cannot write {file.path}: {error.strerror}", hint=hint) from error
    except CorralError:
        if not file.size_bytes:
            file.path.unlink(missing_ok=True)
        raise
    return _result(file)


def show() -> CommandResult:
    running = Client(directories().control_socket).status().capture
    text = capture_text(running) if running else "nothing is captured"
    return CommandResult(running, text)


def stop() -> CommandResult:
    """End the running capture; the command that started it keeps the file."""
    client = Client(directories().control_socket)
    running = client.status().capture
    client.stop_capture()
    return CommandResult(running, "stopped the capture" if running else "nothing is captured")


def _fill(file: CaptureFile, client: Client, body: dict[str, Any], duration_s: float) -> None:
    try:
        with ProgressMeter() as meter:
            for line in client.capture(**body):
                file.write(line)
                done = min(1.0, file.age_s / duration_s)
                meter.show("capturing", done, f"{file.requests} requests, {size(file.size_bytes)}")
    except DaemonBusy:
        if not file.size_bytes:
            raise  # it never began; with a line, the daemon ended in the middle of the capture


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM; an exception would lose a partly read line."""

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
    amounts = f"{file.requests} {noun}, {file.responses} answered, {size(file.size_bytes)}"
    text = f"captured {amounts}; {why}\n{file.path}"
    lost = [f"{dropped} requests or responses were dropped"] if dropped else []
    return CommandResult(data, text, (*lost, _CONTENT), exit_code=0 if end else 1)
