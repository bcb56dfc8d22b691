"""Implements `corral serve --desktop`: connects one host to the backend of its runtime directory.

The backend is a daemon that ends when its last host leaves. This process copies the daemon's events
to standard output and its log to standard error, and leaves when the host ends. So a host that
reads nothing, or that kills this process, disturbs no other host.

Output is one JSON object per line; `docs/desktop.md` lists their members.

Source: https://jsonlines.org.
"""

from __future__ import annotations

import os
import queue
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from supervisor import errors
from supervisor.cli.serve import settings_options, spawn_daemon
from supervisor.daemon.control_client import Client, Stream, StreamEnded
from supervisor.daemon.control_messages import DaemonStatus, JoinedHost, read
from supervisor.daemon.model_commands import resolve_running
from supervisor.events import DAEMON_STOPPED, Event
from supervisor.log import json_sink
from supervisor.output import CommandResult, to_json
from supervisor.system.daemon_lock import ProcessIdentity, identity_of, read_owner
from supervisor.system.paths import Directories, directories

_READ_BYTES: Final = 4096
# A pidfd waits in the kernel; systems without pidfds poll every 20 ms anyway.
_WAIT_S: Final = 3600.0
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OnGone = Callable[[str], None]


def watch_host(stdin: int, watch_pid: int | None, on_gone: OnGone) -> None:
    """Call `on_gone` with a reason, in any thread, each time a sign of the host's end is seen.

    Raises SettingsInvalid if there is nothing to watch, or no such process.
    """
    process = _identity(watch_pid) if watch_pid else None
    is_watched = _can_close(stdin)
    if not (is_watched or process):
        raise errors.SettingsInvalid(
            "corral serve --desktop cannot see the end of its host: standard input is not a pipe",
            hint="keep a pipe open as its standard input, or pass --watch-pid PID",
        )

    def wait_closed() -> None:
        with suppress(OSError):
            while os.read(stdin, _READ_BYTES):
                pass
        on_gone("standard input was closed")

    for number in _SIGNALS:
        signal.signal(number, lambda received, _: on_gone(f"{signal.Signals(received).name}"))
    if is_watched:
        _run_in_thread(wait_closed)
    if process:
        _run_in_thread(lambda: _watch_process(process, on_gone))


def _identity(pid: int) -> ProcessIdentity:
    try:
        return identity_of(pid)
    except ProcessLookupError as error:
        raise errors.SettingsInvalid(
            f"--watch-pid {pid}: there is no such process", hint="pass the pid of the application"
        ) from error


def _can_close(descriptor: int) -> bool:
    """Return whether the end of a descriptor means that its other side has ended."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _watch_process(process: ProcessIdentity, on_gone: OnGone) -> None:
    while not process.wait(_WAIT_S):
        pass
    on_gone(f"process {process.pid} has ended")


def _run_in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()


_WAITING_MAX: Final = 1024
_FLUSH_TIMEOUT_S: Final = 1.0


class LineWriter:
    """Writes lines in a thread; `write` never waits.

    If more than 1024 lines wait, the oldest are dropped, and `missed` makes a line of their number.
    """

    def __init__(self, descriptor: int, missed: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._missed = missed
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        with self._changed:
            if len(self._lines) >= _WAITING_MAX:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Write the waiting lines, for at most a second."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while (text := self._next()) is not None:
            if is_open:
                is_open = self._write_all(text.encode(errors="backslashreplace"))

    def _next(self) -> str | None:
        with self._changed:
            while not (self._lines or self._is_closing):
                self._changed.wait()
            dropped, self._dropped = self._dropped, 0
            lines = [self._missed(dropped)] if dropped else []
            lines += [self._lines.popleft()] if self._lines else []
        return "".join(f"{line}\n" for line in lines) if lines else None

    def _write_all(self, content: bytes) -> bool:
        """Return whether the pipe has a reader."""
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            return False
        return True


SCHEMA: Final = 1
Line = dict[str, object]

# Events that are errors without a code.
_ERROR_CODES: Final[Mapping[str, str]] = {
    "model.load_refused": "load_refused",
    "worker.failed": "worker_failed",
    "settings.rejected": "settings_invalid",
    "task.failed": "internal_error",
}


def ready_line(joined: JoinedHost, requested: Sequence[str], log: str, *, attached: bool) -> Line:
    """Return the first line; `requested`: the names of the models that the host asked for."""
    status = joined.status
    return {
        "event": "ready",
        "schema": SCHEMA,
        "url": status.url,
        "pid": status.pid,
        "version": status.version,
        "api_key_file": joined.api_key_file,
        "tls_cert": status.tls_cert,
        "attached": attached,
        "models": [model.name for model in status.models],
        "requested": list(requested),
        "log": log,
    }


def state_lines(status: DaemonStatus) -> Iterator[Line]:
    """Yield the present state of each instance, and the error of each failed instance."""
    for model in status.models:
        for instance in model.instances:
            names = {"model": model.name, "instance": instance.name}
            state, error = instance.state, instance.error
            yield {"event": "state", **names, "state": state, "reason": error and error["code"]}
            if error:
                yield {"event": "error", **error, **names}


def event_lines(event: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the line for an event of the daemon, if hosts get one."""
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


def missed_line(count: int) -> Line:
    return {"event": "missed", "count": count}


_TIMEOUT_S: Final = 30.0
# Time for a daemon that holds the lock to answer or to end, before another one is started.
_ANSWER_S: Final = 0.5
_POLL_S: Final = 0.05


def join(
    client: Client, where: Directories, words: Sequence[str], options: Sequence[str]
) -> tuple[Stream[DaemonStatus], JoinedHost, tuple[str, ...] | None]:
    """Join within half a minute; starts a daemon with `words` and `options` if none runs.

    Returns:
        Messages: the host is joined while they are open. The host. The models of a new daemon.

    Raises:
        CorralError: No daemon can be started, or the running daemon is no desktop backend.
    """
    until_s = time.monotonic() + _TIMEOUT_S
    started, spawn_at_s = None, 0.0
    with _lifeline() as stdin:
        while True:
            try:
                messages = client.host()
                return messages, read(JoinedHost, next(messages)["host"]), started
            except errors.DaemonStopping:
                _wait_until_stopped(where, until_s)
            except errors.NotRunning:
                if time.monotonic() > until_s:
                    raise
            if time.monotonic() < spawn_at_s:
                time.sleep(_POLL_S)
                continue
            try:
                started = spawn_daemon(words, ["--desktop", *options], where, stdin)
            except (
                errors.DaemonBusy
            ):  # another host's daemon holds the lock and does not answer yet
                spawn_at_s = time.monotonic() + _ANSWER_S


@contextmanager
def _lifeline() -> Iterator[int]:
    """Yield the read end of a pipe that closes after the block, or when this process is killed."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def _wait_until_stopped(where: Directories, until_s: float) -> None:
    """Wait for the end of a stopping daemon; raises DaemonStopping if it takes too long."""
    owner = read_owner(where.state_file)
    if owner and not owner.wait(max(0.0, until_s - time.monotonic())):
        raise errors.DaemonStopping(
            "the daemon of this runtime directory has been stopping for half a minute",
            hint="another corral stop ends it at once",
            log=str(where.daemon_log),
        )


LISTEN: Final = "127.0.0.1:0"
_EXIT_TIMEOUT_S: Final = 10.0


def serve_desktop(
    words: Sequence[str], config: Path | None, watch_pid: int | None
) -> CommandResult:
    output = LineWriter(1, lambda count: to_json(missed_line(count)))
    log = LineWriter(2, lambda count: to_json({"event": "events.dropped", "count": count}))

    def write(line: Line) -> None:
        output.write(to_json(line))

    try:
        host = _DesktopHost(directories(), write, log.write)
        watch_host(0, watch_pid, host.leave)
        host.serve(words, settings_options(config, LISTEN))
    except errors.CorralError as error:
        write({"event": "error", **error.as_json()})
        raise
    finally:
        output.close()
        log.close()
    return CommandResult(None)


class _DesktopHost:
    def __init__(
        self, where: Directories, write: Callable[[Line], None], write_log: Callable[[str], None]
    ) -> None:
        self._where = where
        self._client = Client(where.control_socket)
        self._write = write
        self._log = json_sink(write_log)
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._number: int | None = None
        self._has_stopped = False

    def leave(self, reason: str) -> None:
        """Leave the daemon for this reason; callable in any thread and in a signal handler."""
        self._reasons.put(reason)

    def serve(self, words: Sequence[str], options: Sequence[str]) -> None:
        """Join the daemon, and forward its events until it ends or this host has left."""
        _run_in_thread(self._wait_for_reasons)
        messages, host, started = join(self._client, self._where, words, options)
        self._number, status = host.host, host.status
        models = resolve_running(words, status) if started is None else started
        self._write(ready_line(host, models, str(self._where.daemon_log), attached=started is None))
        for line in state_lines(status):
            self._write(line)

        def start() -> None:
            with suppress(errors.CorralError):  # the daemon's events tell the result
                next(self._client.command("start", models), None)

        if words or started is not None:
            _run_in_thread(start)
        try:
            self._forward_events(messages, status.pid)
        except errors.DaemonBusy as error:
            if not isinstance(error, StreamEnded) and _is_alive(status.pid):
                raise
            raise errors.DaemonExited(
                "the daemon was killed",
                hint="start corral serve --desktop again; the end of its log may say why",
                log=str(self._where.daemon_log),
            ) from error

    def _wait_for_reasons(self) -> None:
        """Leave for the first reason; a second one ends the wait for the daemon."""
        self._reasons.get()
        if self._number is None:
            os._exit(0)  # a daemon that was started for this host sees its pipe closed
        with suppress(errors.CorralError):
            self._client.leave(self._number)
        self._reasons.get()
        os._exit(0)

    def _forward_events(self, messages: Stream[DaemonStatus], pid: int) -> None:
        """Forward events until the regular end of their stream; raises DaemonBusy if it breaks."""
        for message in messages:
            if event := message.get("event"):
                self._has_stopped |= event["name"] == DAEMON_STOPPED
                self._log(
                    Event(event["name"], datetime.fromisoformat(event["at"]), event["fields"])
                )
                for line in event_lines(event):
                    self._write(line)
        if self._has_stopped:
            with suppress(ProcessLookupError):
                identity_of(pid).wait(_EXIT_TIMEOUT_S)
        self._write({"event": "stopped", "daemon_running": not self._has_stopped})


def _is_alive(pid: int) -> bool:
    try:
        return identity_of(pid).is_alive()
    except ProcessLookupError:
        return False
