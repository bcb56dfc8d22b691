"""One command of a hook: its program, its environment, and its run to the end.

What the environment leaves out holds secrets: API keys, tokens, passwords in addresses of proxies.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.hooks.hook_event import HookEvent
from supervisor.process.child import Child, Exit
from supervisor.process.exit_cause import signal_name
from supervisor.process.group_tether import GroupTether
from supervisor.process.log_file import LogRing

_NAMES: Final = frozenset(
    {
        "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOME", "LANG", "LOGNAME", "PATH", "SHELL",
        "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "WAYLAND_DISPLAY", "XAUTHORITY",
        "CORRAL_CACHE_DIR", "CORRAL_CONFIG", "CORRAL_CONFIG_DIR", "CORRAL_DATA_DIR",
        "CORRAL_LOG_DIR", "CORRAL_RUNTIME_DIR",
    }
)  # fmt: skip
_PREFIXES: Final = ("LC_", "XDG_")
# What is read of a command's output, after which it is killed; and what is kept, its end.
_OUTPUT_MAX_BYTES: Final = 1024**2
_KEPT_BYTES: Final = 4096
_KEPT_LINES: Final = 50


@dataclass(frozen=True, slots=True)
class HookCommand:
    """A command and what it runs in; fits `supervisor.process.child.Command`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path


@dataclass(frozen=True, slots=True)
class HookRun:
    """The end of a command.

    Attributes:
        problem: Why it failed, as a clause; None where it exited with 0.
        output: The last lines of its standard output and error.
        duration_s: None where its end was not seen.
    """

    problem: str | None
    output: str
    duration_s: float | None


def hook_directory(settings_file: Path | None) -> Path:
    """Where commands run: beside the settings file, or at home without one."""
    return settings_file.parent if settings_file else Path.home()


def hook_command(
    words: tuple[str, ...], event: HookEvent, cwd: Path, environ: Mapping[str, str] = os.environ
) -> HookCommand:
    kept = {
        name: value
        for name, value in environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    told = {"HOOK_EVENT": event.event, "HOOK_MODEL": event.model, "HOOK_NODE": event.node}
    own = {name: value for name, value in told.items() if value is not None}
    program = os.path.expanduser(words[0])  # noqa: PTH111 (Path would drop a leading ./)
    return HookCommand((program, *words[1:]), kept | own, cwd)


def missing_program(command: HookCommand) -> str | None:
    """Return why the program of a command cannot be run, or None."""
    program, path = command.argv[0], command.env.get("PATH", os.defpath)
    if "/" not in program:
        return None if shutil.which(program, path=path) else f"{program} is not in PATH ({path})"
    found = command.cwd / program
    if not found.is_file():
        return f"there is no program {found}"
    return None if os.access(found, os.X_OK) else f"{found} is not executable (chmod +x {found})"


class _Output:
    """The output of a command, up to a limit."""

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


async def run_command(command: HookCommand, content: bytes, timeout_s: float) -> HookRun:
    """Run a command to its end; its process group is killed then, and if this is cancelled."""
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
