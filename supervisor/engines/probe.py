"""Runs a llama-server's `--version`, `--help` and `--list-devices`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import EngineBroken
from supervisor.host import json_cache
from supervisor.host.spawn_options import creation_flags, library_path

# Each command has a time limit, and an environment without the variables that change the engine's
# behaviour. The output is cached by the file's path, size and modification time, until the machine
# reboots: devices may have changed then.

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OUTPUT_MAX: Final = 1 << 20
_WRONG_MACHINE: Final = "it may be built for another machine, or its download is incomplete"


@dataclass(frozen=True, slots=True)
class ProbeOutput:
    """The engine's output, unparsed."""

    version: str
    help: str
    devices: str


def probe(
    path: Path, library_dirs: Sequence[Path], *, cache_dir: Path, limit_s: float
) -> ProbeOutput:
    """Probe an engine, each command with a limit of `limit_s` seconds.

    Raises:
        EngineBroken: It does not run, or is not a llama-server.
    """
    key = json_cache.key_of([path], *map(str, library_dirs), _boot_id())
    cached = json_cache.get(cache_dir / "engines", key)
    if cached and cached.keys() == {"version", "help", "devices"}:
        return ProbeOutput(**cached)
    env = environment(os.environ, path, library_dirs)
    version, text, devices = (
        _run([str(path), option], env, limit_s)
        for option in ("--version", "--help", "--list-devices")
    )
    if "--ctx-size" not in text or "--port" not in text:
        raise EngineBroken(
            f"{path} runs, but its --help is not that of llama-server",
            hint="give the path of llama-server, not of another tool of llama.cpp",
        )
    json_cache.put(
        cache_dir / "engines", key, {"version": version, "help": text, "devices": devices}
    )
    return ProbeOutput(version, text, devices)


def environment(
    environ: Mapping[str, str], program: Path, library_dirs: Sequence[Path]
) -> dict[str, str]:
    """The environment without llama.cpp's own variables, with these library directories first."""
    env = {name: value for name, value in environ.items() if not name.startswith("LLAMA_")}
    return env | library_path(env, program, library_dirs)


def _boot_id() -> str:
    return _BOOT_ID.read_text("utf-8") if _BOOT_ID.is_file() else ""


def _run(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
    """Output of a command; old builds print their version to stderr."""
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=limit_s,
            creationflags=creation_flags(),
        )
    except OSError as error:
        raise _did_not_start(argv[0], error) from error
    except subprocess.TimeoutExpired as error:
        raise EngineBroken(
            f"{argv[0]} {argv[1]} did not finish within {limit_s:g} s",
            hint="run it manually: a GPU driver may be stuck",
        ) from error
    output = [part[:_OUTPUT_MAX].decode("utf-8", "replace") for part in (done.stdout, done.stderr)]
    if done.returncode:
        raise _failed(argv, done.returncode, output[1] or output[0])
    return output[0] if output[0].strip() else output[1]


def _did_not_start(path: str, error: OSError) -> EngineBroken:
    if isinstance(error, PermissionError):
        return EngineBroken(f"{path} is not executable", hint=f"chmod +x {path}")
    return EngineBroken(f"{path} cannot be executed: {error.strerror}", hint=_WRONG_MACHINE)


def _failed(argv: Sequence[str], returncode: int, output: str) -> EngineBroken:
    first_line = next((line.strip() for line in output.splitlines() if line.strip()), "no output")
    if "shared librar" in output:
        hint = "install this library, or add its directory to LD_LIBRARY_PATH"
        return EngineBroken(f"{argv[0]} does not run: {first_line}", hint=hint)
    if returncode == -signal.SIGILL:
        return EngineBroken(
            f"{argv[0]} died of an illegal instruction: it was compiled for a newer processor",
            hint="set engine to a llama-server built for this machine",
        )
    how = f"died of signal {-returncode}" if returncode < 0 else f"exited with {returncode}"
    return EngineBroken(f"{argv[0]} {argv[1]} {how}: {first_line}", hint=_WRONG_MACHINE)
