"""One run of an engine: its process, its log, and the reports in its output. Decides nothing.

Quotes of refused requests are left out of an engine's log. At its usual verbosity an engine logs no
prompt and no answer, but it quotes the parts of a request that it cannot read: a tool, a schema,
the name of a sampler, a whole grammar.

Source: llama-server, build 10434: server-http.cpp, "got exception"; sampling.cpp, "unable to match
sampler by name"; llama-grammar.cpp, "error parsing grammar", then an empty line and the grammar.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from proxy.common.background_tasks import FAILURES
from supervisor.engine import exit_cause
from supervisor.engine.child import Child, Exit, ProcessorTime
from supervisor.engine.client import Endpoint, EngineClient
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.launch import EXIT_LINE, Launch, Progress, ReportReader
from supervisor.engine.log_file import LineSplitter, LogFile, LogRing
from supervisor.errors import CorralError
from supervisor.system.limits import OomKillWatch

LEFT_OUT: Final = b"[left out: it quotes the request]"
_QUOTING: Final = re.compile(
    rb"got exception: |unable to match sampler by name |parse: error parsing grammar: "
)
_GRAMMAR: Final = b"parse: error parsing grammar: "
# The line after the grammar: it begins with a time, or with a name in builds that print no time.
_BEHIND: Final = re.compile(rb"\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |(srv|slot|que|res|llama_\w+): ? ")
_FAILED: Final = b"failed to parse grammar"
# The beginning of a longer line decides about the whole line.
_HELD_MAX_BYTES: Final = 4096


class QuotedRequests:
    """Removes the quotes from a stream; holds a line until it has ended or is long."""

    def __init__(self) -> None:
        self._held = b""
        self._grammar_lines = 0  # how many lines of a grammar may still follow
        self._is_decided = False  # whether `_drops_rest` applies to the rest of a long line
        self._drops_rest = False

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes of the stream; return those that may be written now."""
        is_at_line_start = not (self._held or self._grammar_lines or self._is_decided)
        if is_at_line_start and chunk.endswith(b"\n") and not _QUOTING.search(chunk):
            return chunk
        *lines, last = chunk.split(b"\n")
        passed = [self._take_line_end(line) for line in lines]
        return b"".join([*passed, self._take_line_part(last)])

    def flush(self) -> bytes:
        return self._take_line_end(b"").removesuffix(b"\n") if self._held else b""

    def _take_line_end(self, rest: bytes) -> bytes:
        if self._is_decided:
            self._is_decided = False
            return b"\n" if self._drops_rest else rest + b"\n"
        line, self._held = self._held + rest, b""
        kept = self._without_quote(line)
        return b"" if kept is None else kept + b"\n"

    def _take_line_part(self, part: bytes) -> bytes:
        if self._is_decided:
            return b"" if self._drops_rest else part
        self._held += part
        if len(self._held) <= _HELD_MAX_BYTES:
            return b""
        line, self._held = self._held, b""
        kept = self._without_quote(line)
        self._is_decided, self._drops_rest = True, kept != line
        return kept or b""

    def _without_quote(self, line: bytes) -> bytes | None:
        """Return a line without its quote; None for a line of a grammar."""
        if self._grammar_lines:
            if not (_BEHIND.match(line) or _FAILED in line):
                self._grammar_lines -= 1
                return None
            self._grammar_lines = 0
        if found := _QUOTING.search(line):
            self._grammar_lines = 10_000 if found[0] == _GRAMMAR else 0
            return line[: found.end()] + LEFT_OUT
        return line


# Builds differ in the words before "listening on unix:///path.sock".
_LISTENING: Final = re.compile(rb"listening on (?:(?P<scheme>\w+)://)?(?P<where>\S+)")

_OOM_KILLS: Final = OomKillWatch()


class ProcessRun:
    """One run of an engine, from 1. Calls `on_progress` for each whole percent of the load."""

    def __init__(
        self,
        number: int,
        launch: Launch,
        *,
        clock: Callable[[], float],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.number = number
        self.launch = launch
        self.endpoint: Endpoint = launch.endpoint  # port 0 until the engine reports it
        self.progress: Progress | None = None  # None if the build does not report it
        self.ready_hint = asyncio.Event()  # set when the engine reports that it listens
        self.alive_at_s = clock()  # when it last wrote anything
        self._clock = clock
        self._on_progress = on_progress
        self._ring = LogRing()
        self._on_out, self._on_err = QuotedRequests(), QuotedRequests()
        self._log: LogFile | None = None
        self._child: Child | None = None
        self._exit_signal = signal.SIGINT if launch.blocks_sigterm else signal.SIGTERM
        self._reports = ReportReader()
        self._lines: LineSplitter | None = LineSplitter()
        self._is_child_mode = False
        self._is_listening = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def cpu_s(self) -> float | None:
        return self._child.cpu_s() if self._child else None

    def processor_time(self) -> ProcessorTime | None:
        return self._child.processor_time() if self._child else None

    def is_suspended(self) -> bool:
        return self._child is not None and self._child.is_suspended()

    def client(self) -> EngineClient:
        return EngineClient(self.endpoint, self.launch.api_key)

    def last_lines(self, count: int) -> tuple[str, ...]:
        return self._ring.last_lines(count)

    async def run(self) -> Exit:
        """Spawn the engine and wait for its exit; kills it if cancelled.

        Raises OSError if it cannot be spawned, AccessDenied for its log; then nothing was spawned.
        """
        async with self.launch.surroundings():
            with LogFile(self.launch.log_path) as self._log:
                return await self._run_child(self._log)

    async def _run_child(self, log: LogFile) -> Exit:
        now = datetime.now(tz=UTC).isoformat(timespec="seconds")
        header = f"[llama-corral: run {self.number}, {now}] {' '.join(self.launch.argv)}\n"
        log.write(header.encode(errors="replace"))
        self._remove_socket()
        try:
            self._child = Child.spawn(self.launch)
            end = await self._child.wait(self._on_stdout, self._on_stderr)
            return replace(end, is_out_of_memory=_OOM_KILLS.has_killed())
        finally:
            self._record(self._on_out.flush() + self._on_err.flush())
            self._child = None
            self._remove_socket()

    def request_exit(self) -> str | None:
        """Ask the engine to exit; return the means, or None if there is no process."""
        # In child mode, once it listens, the engine obeys the exit line at once, while SIGTERM
        # hangs as long as stdin is open and aborts when stdin closes. While it loads, it ignores
        # the line, and SIGTERM ends it. Builds without child mode only know SIGTERM.
        if self._child is None:
            return None
        obeys_lines = self._is_child_mode and self._is_listening
        if obeys_lines:
            self._child.write_line(EXIT_LINE)
        else:
            self._child.signal(self._exit_signal)
        self._child.close_stdin()
        return "exit line" if obeys_lines else self._exit_signal.name

    def terminate(self) -> str:
        """Send the exit signal; an engine that hangs in its first exits at once on the second."""
        if self._child:
            self._child.signal(self._exit_signal)
        return self._exit_signal.name

    def kill(self) -> None:
        if self._child:
            self._child.signal(signal.SIGKILL)

    def stop_parsing(self) -> None:
        self._lines = None

    def _on_stdout(self, chunk: bytes) -> None:
        reports, log = self._reports.feed(chunk)
        for state, progress in reports:
            self._is_child_mode = True
            if progress:
                before, self.progress = self.progress, progress
                if before is None or int(100 * before[1]) != int(100 * progress[1]):
                    self._on_progress(progress)
            if state == "ready":
                self._set_listening()
        if log:
            self._record(self._on_out.feed(log))
        self.alive_at_s = self._clock()

    def _on_stderr(self, chunk: bytes) -> None:
        self._record(self._on_err.feed(chunk))
        if self._lines:
            for line in self._lines.feed(chunk):
                self._find_address(line)
        self.alive_at_s = self._clock()

    def _find_address(self, line: bytes) -> None:
        found = _LISTENING.search(line)
        if found is None:
            return
        port = found["where"].rpartition(b":")[2].strip(b"/")
        if self.endpoint.socket is None and port.isdigit():
            self.endpoint = replace(self.endpoint, port=int(port))
        self._set_listening()

    def _set_listening(self) -> None:
        self._is_listening = True
        self.ready_hint.set()

    def _record(self, chunk: bytes) -> None:
        self._ring.feed(chunk)
        if self._log:
            self._log.write(chunk)

    def _remove_socket(self) -> None:
        # A build refuses to listen on a socket that a dead engine left behind.
        if self.launch.endpoint.socket:
            self.launch.endpoint.socket.unlink(missing_ok=True)


async def run_to_exit(start: Callable[[], ProcessRun]) -> Exit | FailureCause:
    """Make a run and wait for its exit; return the cause if that fails."""
    run: ProcessRun | None = None
    try:
        run = start()
        return await run.run()
    except CorralError as error:
        return exit_cause.not_launchable(error)
    except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
        if run and isinstance(error, OSError):
            return exit_cause.spawn_failed(error, run.launch.argv[0])
        FAILURES.note("instance process", error)
        return exit_cause.internal(error)
