"""One run of an engine: its process, its log, and what can be read from what it says.

It owns no policy: it says what it heard and does as it is told. A run is over when `live` returns.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from supervisor.engine_client.endpoint import Endpoint
from supervisor.process.child import Child, Exit
from supervisor.process.launch import Launch
from supervisor.process.lines import LineSplitter
from supervisor.process.load_progress import EXIT_LINE, Progress, ReportReader
from supervisor.process.log_file import LogFile, LogRing

# Builds differ in the words before it; the last ones are "listening on unix:///path.sock".
_LISTENING: Final = re.compile(rb"listening on (?:(?P<scheme>\w+)://)?(?P<where>\S+)")


class ProcessRun:
    """One run of an engine.

    Args:
        number: The run, from 1.
        launch: All it needs.
        clock: Monotonic seconds.
        on_progress: Told the run and how far loading is, at each report.

    Attributes:
        number: The run, from 1.
        launch: All it needs.
        endpoint: Where it listens, as far as known.
        progress: How far loading has come; None where the engine does not say.
        ready_hint: Set when the engine has said something that makes a look at its health worth
            while.
        alive_at_s: When it last gave a sign of life.
    """

    def __init__(
        self,
        number: int,
        launch: Launch,
        *,
        clock: Callable[[], float],
        on_progress: Callable[[int, Progress], None],
    ) -> None:
        self.number = number
        self.launch = launch
        self.endpoint: Endpoint = launch.endpoint
        self.progress: Progress | None = None
        self.ready_hint = asyncio.Event()
        self.alive_at_s = clock()
        self._clock = clock
        self._on_progress = on_progress
        self._ring = LogRing()
        self._log: LogFile | None = None
        self._child: Child | None = None
        self._reports = ReportReader()
        self._lines: LineSplitter | None = LineSplitter()
        self._is_child_mode = False
        self._is_listening = False

    @property
    def pid(self) -> int | None:
        """Return the number of the process; None before and after it."""
        return self._child.pid if self._child else None

    def cpu_s(self) -> float | None:
        """Return the processor time the engine has used, in seconds; None when that is not told."""
        return self._child.cpu_s() if self._child else None

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return up to `count` lines the engine wrote last, oldest first."""
        return self._ring.last_lines(count)

    async def run(self) -> Exit:
        """Spawn the engine and hear it until it is gone. Cancelled, it kills it.

        Raises:
            OSError: The engine cannot be spawned.
            AccessDenied: Its log cannot be written; nothing was spawned.
        """
        with LogFile(self.launch.log_path) as self._log:
            self._log.write(self._heading())
            self._unlink()
            try:
                self._child = Child.spawn(self.launch)
                return await self._child.wait(self._hear_stdout, self._hear_stderr)
            finally:
                self._child = None
                self._unlink()

    def request_exit(self) -> str | None:
        """Ask the engine to exit; return how it was asked, None where nobody is there.

        In child mode and listening, it obeys the exit line at once, while SIGTERM hangs as long as
        stdin is open and aborts when that closes. While it loads the line is lost, and SIGTERM ends
        it. Builds without child mode know SIGTERM only.
        """
        if self._child is None:
            return None
        obeys_lines = self._is_child_mode and self._is_listening
        if obeys_lines:
            self._child.write_line(EXIT_LINE)
        else:
            self._child.signal(signal.SIGTERM)
        self._child.close_stdin()
        return "exit line" if obeys_lines else "SIGTERM"

    def terminate(self) -> None:
        """Send SIGTERM: to an engine that hangs in its first one, the order to quit at once."""
        if self._child:
            self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its group."""
        if self._child:
            self._child.signal(signal.SIGKILL)

    def stop_parsing(self) -> None:
        """Stop taking what it says apart into lines: its address is known."""
        self._lines = None

    def _hear_stdout(self, chunk: bytes) -> None:
        reports, log = self._reports.feed(chunk)
        for report in reports:
            self._is_child_mode = True
            if report.progress:
                self.progress = report.progress
                self._on_progress(self.number, report.progress)
            if report.state == "ready":
                self._listens()
        if log:
            self._keep(log)
        self.alive_at_s = self._clock()

    def _hear_stderr(self, chunk: bytes) -> None:
        self._keep(chunk)
        if self._lines:
            for line in self._lines.feed(chunk):
                self._look_for_address(line)
        self.alive_at_s = self._clock()

    def _look_for_address(self, line: bytes) -> None:
        found = _LISTENING.search(line)
        if found is None:
            return
        port = found["where"].rpartition(b":")[2].strip(b"/")
        if self.endpoint.socket is None and port.isdigit():
            self.endpoint = replace(self.endpoint, port=int(port))
        self._listens()

    def _listens(self) -> None:
        self._is_listening = True
        self.ready_hint.set()

    def _keep(self, chunk: bytes) -> None:
        self._ring.feed(chunk)
        if self._log:
            self._log.write(chunk)

    def _heading(self) -> bytes:
        now = datetime.now(tz=UTC).isoformat(timespec="seconds")
        line = f"[llama-corral: run {self.number}, {now}] {' '.join(self.launch.argv)}\n"
        return line.encode(errors="replace")

    def _unlink(self) -> None:
        """Remove the socket: a build refuses to listen on one that a dead engine left behind."""
        if self.launch.endpoint.socket:
            self.launch.endpoint.socket.unlink(missing_ok=True)
