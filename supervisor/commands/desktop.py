"""`corral serve --desktop`: connects one host to the desktop backend of its runtime directory.

The backend is a daemon that ends when its last host leaves. This process passes its events on to
standard output and its log to standard error, and tells it of the host's end. So a host that reads
nothing, or that kills this process, disturbs no other one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from supervisor.commands import desktop_lines
from supervisor.commands.desktop_join import Joined, join
from supervisor.commands.desktop_lines import Line
from supervisor.commands.host_watch import watch_host
from supervisor.commands.line_writer import LineWriter
from supervisor.commands.spawn_daemon import settings_options
from supervisor.control.client import Client
from supervisor.control.messages import EventLine
from supervisor.control.running import resolve_running
from supervisor.errors import CorralError, DaemonBusy, DaemonExited
from supervisor.events import DAEMON_STOPPED, Event
from supervisor.host.paths import Directories, directories
from supervisor.host.process_end import process_end
from supervisor.host.process_identity import identity_of
from supervisor.log import json_sink
from supervisor.output import CommandResult, to_json

_LISTEN: Final = "127.0.0.1:0"
_EXIT_TIMEOUT_S: Final = 10.0


def serve_desktop(
    words: Sequence[str], config: Path | None, watch_pid: int | None
) -> CommandResult:
    """Serve one host until it has gone, or until the daemon ends."""
    output = LineWriter(1, lambda count: to_json(desktop_lines.missed_line(count)))
    log = LineWriter(2, lambda count: to_json({"event": "events.dropped", "count": count}))

    def write(line: Line) -> None:
        output.write(to_json(line))

    try:
        host = _DesktopHost(directories(), write, log.write)
        watch_host(0, watch_pid, host.gone)
        host.serve(words, settings_options(config, _LISTEN))
    except CorralError as error:
        write(desktop_lines.error_line(error))
        raise
    finally:
        output.close()
        log.close()
    return CommandResult(None)


class _DesktopHost:
    def __init__(
        self,
        where: Directories,
        write: Callable[[Line], None],
        write_log: Callable[[str], None],
    ) -> None:
        self._where = where
        self._client = Client(where.control_socket)
        self._write = write
        self._log = json_sink(write_log)
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._number: int | None = None
        self._has_stopped = False

    def gone(self, reason: str) -> None:
        """Leave the daemon, for this reason; callable in any thread and in a signal handler."""
        self._reasons.put(reason)

    def serve(self, words: Sequence[str], options: Sequence[str]) -> None:
        """Join the daemon, and pass its events on until it ends or this host has left."""
        _in_thread(self._leave)
        joined = join(self._client, self._where, words, options)
        self._number = joined.host["host"]
        models = self._models_meant(words, joined)
        self._greet(joined, models or ())
        if models is not None:
            _in_thread(lambda: self._start(models))
        try:
            is_done = self._pass_on(joined)
        except DaemonBusy:
            if _is_alive(joined.host["status"]["pid"]):
                raise
            is_done = False
        if not is_done:
            raise DaemonExited(
                "the daemon was killed",
                hint="start corral serve --desktop again; the end of its log may say why",
                log=str(self._where.daemon_log),
            )

    def _leave(self) -> None:
        """Leave for the first reason; a second one ends the wait for the daemon."""
        self._reasons.get()
        if self._number is None:
            os._exit(0)  # a daemon that was started for us notices
        with suppress(CorralError):
            self._client.leave(self._number)
        self._reasons.get()
        os._exit(0)

    @staticmethod
    def _models_meant(words: Sequence[str], joined: Joined) -> Sequence[str] | None:
        if joined.started is None and words:
            return resolve_running(words, joined.host["status"])
        return joined.started

    def _start(self, models: Sequence[str]) -> None:
        with suppress(CorralError):  # its events tell how it goes
            next(self._client.command("start", models), None)

    def _greet(self, joined: Joined, requested: Sequence[str]) -> None:
        is_attached = joined.started is None
        log = str(self._where.daemon_log)
        self._write(desktop_lines.ready_line(joined.host, requested, log, attached=is_attached))
        for line in desktop_lines.state_lines(joined.host["status"]):
            self._write(line)

    def _pass_on(self, joined: Joined) -> bool:
        """Return whether the stream of events came to its end."""
        for message in joined.messages:
            if event := message.get("event"):
                self._tell(event)
            elif "done" in message:
                self._end(joined.host["status"]["pid"])
                return True
        return False

    def _tell(self, event: EventLine) -> None:
        self._has_stopped |= event["name"] == DAEMON_STOPPED
        self._log(Event(event["name"], datetime.fromisoformat(event["at"]), event["fields"]))
        for line in desktop_lines.event_lines(event):
            self._write(line)

    def _end(self, pid: int) -> None:
        if self._has_stopped:
            _wait_ended(pid)
        self._write(desktop_lines.stopped_line(is_daemon_running=not self._has_stopped))


def _in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, daemon=True).start()


def _wait_ended(pid: int) -> None:
    with suppress(ProcessLookupError), process_end(identity_of(pid)) as end:
        end.wait(_EXIT_TIMEOUT_S)


def _is_alive(pid: int) -> bool:
    try:
        return identity_of(pid).is_alive()
    except ProcessLookupError:
        return False
