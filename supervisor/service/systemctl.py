"""Runs systemd's programs."""

from __future__ import annotations

import subprocess
from typing import Final

from supervisor.errors import ServiceFailed
from supervisor.service.facts import Scope

# A start, a stop and a restart have limits of their own, so this is for a manager that hangs.
_TIMEOUT_S: Final = 3600


def systemctl(scope: Scope, *words: str) -> str:
    """Return what it printed; raises ServiceFailed."""
    return run("systemctl", *(["--user"] if scope == "user" else []), *words)


def run(*argv: str) -> str:
    """Run a program to its end; raises ServiceFailed."""
    command = " ".join(word for word in argv if not word.startswith("--"))
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ServiceFailed(
            f"systemd is not installed: there is no program {argv[0]}",
            hint="corral service show prints what to install elsewhere",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServiceFailed(f"{command} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise ServiceFailed(f"{command} failed: {reason}", hint=_hint(reason, argv))
    return done.stdout


def _hint(reason: str, argv: tuple[str, ...]) -> str:
    if "bus" in reason or "booted with systemd" in reason:
        return "systemd does not run here; corral service show prints the unit"
    user = " --user" if "--user" in argv else ""
    return f"journalctl{user} -u llama-corral -n 20 shows what the daemon said"
