"""Runs the commands of hooks beside the daemon's work, a few at a time, the others queued.

Commands get no environment variables that may hold secrets: API keys, tokens, passwords in
addresses of proxies.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson

from proxy.common.background_tasks import FAILURES
from supervisor.engine.child import Child, Command, Exit, GroupTether
from supervisor.engine.exit_cause import signal_name
from supervisor.engine.log_file import LogRing
from supervisor.events import Emit
from supervisor.settings.tables import HookName

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class HookCause:
    code: str  # stable
    message: str  # a sentence without a full stop
    hint: str | None = None  # the fix, if any
    log: str | None = None  # the engine's log, once a model is given up


@dataclass(frozen=True, slots=True)
class HookEvent:
    """An event for hooks; members that do not apply are None."""

    event: HookName
    at: datetime
    model: str | None = None
    instance: str | None = None
    node: str | None = None
    cause: HookCause | None = None
    restarts: bool | None = None  # whether a failed process starts again
    idle_s: float | None = None  # the time without a request

    @property
    def subject(self) -> str:
        """The model, node or daemon; commands for one subject run in the order of its events."""
        if self.model:
            return f"model {self.model}"
        return f"node {self.node}" if self.node else "daemon"

    def as_json(self) -> bytes:
        """Return one line that always has every member."""
        members = asdict(self)
        at = members.pop("at").astimezone(UTC).isoformat(timespec="milliseconds")
        line = {"schema": SCHEMA, "event": members.pop("event"), "time": at, **members}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


_EXAMPLE_CAUSES: Final[Mapping[HookName, HookCause]] = {
    "model_unloaded": HookCause("unloaded", "no request came within ttl_s"),
    "model_failed": HookCause(
        "killed",
        "the engine was killed from outside (signal 9)",
        "most often the kernel, out of memory: see `dmesg`; lower ctx-size or use low-memory",
    ),
    "node_down": HookCause("unreachable", "connection refused"),
}


def example(hook: HookName, at: datetime, model: str, node: str) -> HookEvent:
    is_node, is_model = hook.startswith("node_"), hook.startswith("model_")
    has_instance = hook in {"model_loaded", "model_unloaded", "model_failed"}
    return HookEvent(
        hook,
        at,
        model=model if is_model else None,
        instance=f"{model}.0" if has_instance else None,
        node=node if is_node else None,
        cause=_EXAMPLE_CAUSES.get(hook),
        restarts=True if hook == "model_failed" else None,
        idle_s=600.0 if hook.endswith("_idle") else None,
    )


_NAMES: Final = frozenset(
    {
        "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOME", "LANG", "LOGNAME", "PATH", "SHELL",
        "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "WAYLAND_DISPLAY", "XAUTHORITY",
        "CORRAL_CACHE_DIR", "CORRAL_CONFIG", "CORRAL_CONFIG_DIR", "CORRAL_DATA_DIR",
        "CORRAL_LOG_DIR", "CORRAL_RUNTIME_DIR",
    }
)  # fmt: skip
_PREFIXES: Final = ("LC_", "XDG_")
# A command that writes more than the first is killed; the end of its output is kept.
_OUTPUT_MAX_BYTES: Final = 1024**2
_KEPT_BYTES: Final = 4096
_KEPT_LINES: Final = 50


@dataclass(frozen=True, slots=True)
class HookRun:
    """The end of a command."""

    problem: str | None  # why it failed, or None
    output: str  # the last lines
    duration_s: float | None  # None if its end was not seen


def hook_directory(settings_file: Path | None) -> Path:
    """Return the directory to run commands in: that of the settings file, or the home directory."""
    return settings_file.parent if settings_file else Path.home()


def hook_command(
    words: tuple[str, ...], event: HookEvent, cwd: Path, environ: Mapping[str, str] = os.environ
) -> Command:
    kept = {
        name: value
        for name, value in environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    told = {"HOOK_EVENT": event.event, "HOOK_MODEL": event.model, "HOOK_NODE": event.node}
    own = {name: value for name, value in told.items() if value is not None}
    program = os.path.expanduser(words[0])  # noqa: PTH111 (Path would drop a leading ./)
    return Command((program, *words[1:]), kept | own, cwd)


def missing_program(command: Command) -> str | None:
    """Return why the program of a command cannot be run, or None."""
    program, path = command.argv[0], command.env.get("PATH", os.defpath)
    if "/" not in program:
        return None if shutil.which(program, path=path) else f"{program} is not in PATH ({path})"
    found = command.cwd / program
    if not found.is_file():
        return f"there is no program {found}"
    return None if os.access(found, os.X_OK) else f"{found} is not executable (chmod +x {found})"


class _Output:
    """The output of a command; a command that writes too much is killed."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._ring = LogRing(_KEPT_BYTES)
        self._count_bytes = 0

    @property
    def is_flood(self) -> bool:
        return self._count_bytes > _OUTPUT_MAX_BYTES

    @property
    def text(self) -> str:
        return "\n".join(self._ring.last_lines(_KEPT_LINES))

    def feed(self, chunk: bytes) -> None:
        self._count_bytes += len(chunk)
        self._ring.feed(chunk)
        if self.is_flood:
            self._child.signal(signal.SIGKILL)


async def run_command(command: Command, content: bytes, timeout_s: float) -> HookRun:
    """Run a command to its end or until cancelled; then its process group is killed."""
    began_at_s = time.monotonic()
    try:
        child = Child.spawn(command, GroupTether())
    except OSError as error:
        reason = missing_program(command) or f"it cannot be run: {error.strerror or error}"
        return HookRun(reason, "", 0.0)
    child.write_line(content)
    child.close_stdin()
    output, ended = _Output(child), None
    try:
        async with asyncio.timeout(timeout_s):
            ended = await child.wait(output.feed, output.feed)
    except TimeoutError:
        pass
    problem = _problem(ended, output, timeout_s)
    return HookRun(problem, output.text, round(time.monotonic() - began_at_s, 3))


def _problem(ended: Exit | None, output: _Output, timeout_s: float) -> str | None:
    if output.is_flood:
        return f"it wrote more than {_OUTPUT_MAX_BYTES >> 20} MiB and was killed"
    if ended is None:
        return f"it did not end within {timeout_s:g} s and was killed"
    if ended.signal:
        return f"it was ended by {signal_name(ended.signal)}"
    return f"it exited with code {ended.code}" if ended.code else None


_WAITING_MAX: Final = 64
_RUNNING_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class HookJob:
    """An event and its commands, which run one after another; each has `timeout_s`."""

    event: HookEvent
    commands: tuple[tuple[str, ...], ...]
    timeout_s: float
    cwd: Path


class JobQueue:
    """Jobs in order of arrival; jobs for one subject never run at the same time."""

    def __init__(self) -> None:
        self._waiting: deque[HookJob] = deque()
        self._running: dict[str, HookJob] = {}
        self._dropped = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._running

    def add(self, job: HookJob) -> bool:
        """Return whether there was room; jobs without room are counted."""
        if len(self._waiting) < _WAITING_MAX:
            self._waiting.append(job)
            return True
        self._dropped += 1
        return False

    def begin(self) -> HookJob | None:
        """Take the first job that may run now."""
        if len(self._running) >= _RUNNING_MAX:
            return None
        found = next((job for job in self._waiting if job.event.subject not in self._running), None)
        if found:
            self._waiting.remove(found)
            self._running[found.event.subject] = found
        return found

    def end(self, job: HookJob) -> None:
        del self._running[job.event.subject]

    @property
    def running(self) -> tuple[HookJob, ...]:
        return tuple(self._running.values())

    def drop_waiting(self) -> None:
        self._dropped += len(self._waiting)
        self._waiting.clear()

    def take_dropped(self) -> int:
        """Return how many jobs were dropped since the last call."""
        count, self._dropped = self._dropped, 0
        return count


class HookRunner:
    """Runs jobs while `serve` runs; failed and dropped jobs cause warnings."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._queue = JobQueue()
        self._has_warned = False
        self._group: asyncio.TaskGroup | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    async def serve(self) -> None:
        """Run jobs until cancelled, which kills the running commands."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._begin()
                await asyncio.get_running_loop().create_future()  # until cancelled
            finally:
                self._group = None

    def submit(self, job: HookJob) -> None:
        if self._queue.add(job):
            self._empty.clear()
            self._begin()
        elif not self._has_warned:
            self._has_warned = True
            self._emit("hooks.dropped", hook=job.event.event, count=self._queue.take_dropped())

    async def finish(self) -> None:
        """Wait until nothing runs or is queued; the caller has a deadline, and then kills."""
        try:
            await self._empty.wait()
        finally:
            self._queue.drop_waiting()
            self._report_dropped()
            for job in self._queue.running:
                ran = HookRun("it was killed, because the daemon stopped", "", None)
                self._report(job, job.commands[0], ran)

    def _begin(self) -> None:
        while self._group and (job := self._queue.begin()):
            self._group.create_task(self._run(job), name=f"hook {job.event.event}")
        if self._queue.is_empty:
            self._empty.set()
            self._report_dropped()

    def _report_dropped(self) -> None:
        if count := self._queue.take_dropped():
            self._emit("hooks.dropped", hook=None, count=count)
        self._has_warned = False

    async def _run(self, job: HookJob) -> None:
        try:
            for words in job.commands:
                command = hook_command(words, job.event, job.cwd)
                ran = await run_command(command, job.event.as_json(), job.timeout_s)
                self._report(job, words, ran)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("hooks", error)
        finally:
            self._queue.end(job)
            self._begin()

    def _report(self, job: HookJob, words: tuple[str, ...], ran: HookRun) -> None:
        fields = {
            "hook": job.event.event,
            "model": job.event.model,
            "node": job.event.node,
            "command": words[0],
            "duration_s": ran.duration_s,
            "output": ran.output or None,
        }
        if ran.problem:
            self._emit("hook.failed", **fields, reason=ran.problem)
        else:
            self._emit("hook.finished", **fields)
