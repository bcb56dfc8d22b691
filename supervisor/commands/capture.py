"""`corral capture`: the requests to a model with their responses, in a file."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from supervisor.commands.capture_file import CaptureFile
from supervisor.control.capture_text import capture_text
from supervisor.control.client import Client
from supervisor.control.running import resolve_running
from supervisor.errors import CorralError, DaemonBusy, DiskFull
from supervisor.host.paths import directories, file_name
from supervisor.output import CommandResult, ProgressMeter, size

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
    file = CaptureFile(options.output or _new_name(model))
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


def _new_name(model: str) -> Path:
    return Path(f"{file_name(model)}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.capture.jsonl")


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
