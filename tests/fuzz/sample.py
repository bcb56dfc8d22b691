"""A command as a process of its own, as a person runs it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any, Final

from end_to_end.home import Corral
from fuzz.case import EXIT_CODES

SECONDS: Final = 2.0
MEMORY_MIB: Final = 200.0
_HANG_S: Final = 15.0


def ran(corral: Corral, words: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run a command, and return what is wrong with how it went."""
    output = corral.home / "sample.output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            corral.argv(*words), env=corral.env, cwd=corral.home, stdout=file, stderr=file
        )
    timer = threading.Timer(_HANG_S, process.kill)
    timer.start()
    # Only wait4 tells what this one process took.
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = code = os.waitstatus_to_exitcode(status)
    return [
        {"what": f"{' '.join(words[:2])} as a process: {what}", "detail": _tail(output)}
        for what, is_wrong in {
            f"exit code {code}": code not in EXIT_CODES,
            "a traceback": b"Traceback (most recent call last)" in output.read_bytes(),
            f"takes over {SECONDS:g} s": usage.ru_utime + usage.ru_stime > SECONDS,
            f"takes over {MEMORY_MIB:g} MiB": usage.ru_maxrss / 1024 > MEMORY_MIB,
        }.items()
        if is_wrong
    ]


def _tail(output: Path) -> str:
    return output.read_text("utf-8", errors="replace")[-2000:]
