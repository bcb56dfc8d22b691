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
from contextlib import suppress
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
    ring, written_bytes, ended = LogRing(_KEPT_BYTES), 0, None

    def feed(chunk: bytes) -> None:
        nonlocal written_bytes
        written_bytes += len(chunk)
        ring.feed(chunk)
        if written_bytes > _OUTPUT_MAX_BYTES:
            child.signal(signal.SIGKILL)

    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            ended = await child.wait(feed, feed)
    if written_bytes > _OUTPUT_MAX_BYTES:
        problem: str | None = f"it wrote more than {_OUTPUT_MAX_BYTES >> 20} MiB and was killed"
    elif ended is None:
        problem = f"it did not end within {timeout_s:g} s and was killed"
    else:
        problem = _problem(ended)
    output = "\n".join(ring.last_lines(_KEPT_LINES))
    return HookRun(problem, output, round(time.monotonic() - began_at_s, 3))


def _problem(ended: Exit) -> str | None:
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


class HookRunner:
    """Runs jobs while `serve` runs, four at a time; failed and dropped jobs cause warnings.

    Jobs begin in order of arrival, but those for one subject never run at the same time.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._waiting: deque[HookJob] = deque()
        self._running: dict[str, HookJob] = {}  # by subject
        self._dropped = 0  # since the last warning
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
        if len(self._waiting) < _WAITING_MAX:
            self._waiting.append(job)
            self._empty.clear()
            self._begin()
            return
        self._dropped += 1
        if not self._has_warned:
            self._report_dropped(job.event.event)

    async def finish(self) -> None:
        """Wait until nothing runs or is queued; the caller has a deadline, and then kills."""
        try:
            await self._empty.wait()
        finally:
            self._dropped += len(self._waiting)
            self._waiting.clear()
            self._report_dropped()
            for job in self._running.values():
                ran = HookRun("it was killed, because the daemon stopped", "", None)
                self._report(job, job.commands[0], ran)

    def _begin(self) -> None:
        if group := self._group:
            for job in [*self._waiting]:
                if len(self._running) < _RUNNING_MAX and job.event.subject not in self._running:
                    self._waiting.remove(job)
                    self._running[job.event.subject] = job
                    group.create_task(self._run(job), name=f"hook {job.event.event}")
        if not self._waiting and not self._running:
            self._empty.set()
            self._report_dropped()

    def _report_dropped(self, hook: HookName | None = None) -> None:
        if self._dropped:
            self._emit("hooks.dropped", hook=hook, count=self._dropped)
        self._dropped, self._has_warned = 0, hook is not None

    async def _run(self, job: HookJob) -> None:
        try:
            for words in job.commands:
                command = hook_command(words, job.event, job.cwd)
                ran = await run_command(command, job.event.as_json(), job.timeout_s)
                self._report(job, words, ran)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("hooks", error)
        finally:
            del self._running[job.event.subject]
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
