"""A command in its own process, as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from fuzz.case import EXIT_CODES
from support.corral_cli import CorralCli

SECONDS: Final = 2.0
MEMORY_MIB: Final = 200.0
_HANG_S: Final = 30.0
# Runs a command with its output in a file; prints exit code, processor time and memory in KiB. A
# small process in between is needed: the memory peak of a process starts with its parent's.
_LAUNCH: Final = """
import os, sys
output, *words = sys.argv[1:]
to = (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
actions = (to, (os.POSIX_SPAWN_DUP2, 1, 2))
pid = os.posix_spawn(words[0], words, os.environ, file_actions=actions)
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def ran(corral: CorralCli, words: tuple[str, ...]) -> list[dict[str, Any]]:
    output = corral.root / "sample.output"
    name = " ".join(words[:2])
    taken = _launched(corral, output, corral.argv(*words))
    if taken is None:
        return [{"what": f"{name} as a process: hangs", "detail": _tail(output)}]
    code, took_s, peak_mib = taken
    wrong = {
        f"exit code {code}": code not in EXIT_CODES,
        "a traceback": b"Traceback (most recent call last)" in output.read_bytes(),
        f"takes over {SECONDS:g} s": took_s > SECONDS,
        f"takes over {MEMORY_MIB:g} MiB": peak_mib > MEMORY_MIB,
    }
    detail = f"{took_s:.2f} s, {peak_mib:.0f} MiB; {_tail(output)}"
    return [
        {"what": f"{name} as a process: {what}", "detail": detail}
        for what, is_wrong in wrong.items()
        if is_wrong
    ]


def _launched(corral: CorralCli, output: Path, argv: list[str]) -> tuple[int, float, float] | None:
    """Return exit code, seconds of processor time and MiB of a command; None if it hangs."""
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", _LAUNCH, str(output), *argv],
        env=corral.env,
        cwd=corral.root,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, _ = launcher.communicate(timeout=_HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        return None
    code, took_s, peak_kib = printed.split()
    return int(code), float(took_s), int(peak_kib) / 1024


def _tail(output: Path) -> str:
    return output.read_text("utf-8", errors="replace")[-2000:] if output.exists() else ""
