"""Runs an engine's `--help`, `--version` and `--list-devices`.

Each command has a time limit, and an environment without the variables that change the engine's
behaviour. The output is cached by the file's path, size and modification time, and by the variables
that choose devices, until the machine reboots, as its devices may then have changed.

llama.cpp's unified program `llama` has llama-server as its command `serve`, with the same options.
Without a command, its `--help` lists the commands; the first such builds do not know `--help`.

Source: llama.cpp, app/llama.cpp; llama.cpp pull request 23296.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import EngineBroken
from supervisor.system import files

LIBRARY_PATHS: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
# Source: Windows, Process Creation Flags.
_CREATE_NO_WINDOW: Final = 0x08000000


def library_path(
    environ: Mapping[str, str],
    program: Path,
    library_dirs: Iterable[Path],
    platform: str = sys.platform,
) -> dict[str, str]:
    """Return the library path variable with these directories first; {} if it would be empty.

    macOS searches the libraries of a program without a run path only in the variable's directories,
    so there the program's own directory is added. Source: dyld(1).
    """
    is_mac = platform == "darwin"
    name = "DYLD_LIBRARY_PATH" if is_mac else "LD_LIBRARY_PATH"
    first = [*library_dirs, program.parent] if is_mac else [*library_dirs]
    parts = [*map(str, first), *filter(None, [environ.get(name)])]
    return {name: ":".join(parts)} if parts else {}


def creation_flags(platform: str = sys.platform) -> int:
    """Return `creationflags` for subprocess, so that Windows opens no console window."""
    return _CREATE_NO_WINDOW if platform == "win32" else 0


# Beginnings of variables by which drivers and ggml choose devices, such as CUDA_VISIBLE_DEVICES,
# ONEAPI_DEVICE_SELECTOR and ZE_AFFINITY_MASK.
_OF_DEVICES: Final = (
    *("ASCEND_", "CUDA_", "GGML_", "GPU_", "HIP_", "HSA_", "MUSA_", "NVIDIA_"),
    *("ONEAPI_", "ROCR_", "SYCL_", "VK_", "ZE_"),
)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_OUTPUT_MAX: Final = 1 << 20
_WRONG_MACHINE: Final = "it may be built for another machine, or its download is incomplete"
# Source: execve(2), ENOENT.
_NO_LOADER: Final = (
    "this system has not the loader that it was linked for: it may have musl in place of glibc"
)
_SERVE: Final = "serve"
# Messages of the dynamic linker. Source: glibc, elf/dl-version.c, elf/rtld.c.
_TOO_OLD: Final = re.compile(r"version `(GLIBC|GLIBCXX|CXXABI)_([0-9.]{1,20})' not found")
_LIBRARY: Final = re.compile(r"loading shared libraries: (lib[a-z0-9.+_-]{1,60}): cannot open")
_PACKAGES: Final = {
    "libgomp.so.1": "libgomp1",
    "libssl.so.3": "libssl3",
    "libcurl.so.4": "libcurl4",
    "libvulkan.so.1": "libvulkan1",
}
_LISTS_SERVE: Final = re.compile(r"^ {1,8}serve .*server", re.MULTILINE)
_KNOWS_NO_HELP: Final = "unknown command '--help'"


# The unparsed output of --version, --help and --list-devices, and `serve` or an empty subcommand.
ProbeOutput = tuple[str, str, str, str]


def probe(
    path: Path, library_dirs: Sequence[Path], *, cache_dir: Path, limit_s: float
) -> ProbeOutput:
    """Probe an engine, each command with a limit of `limit_s` seconds.

    Raises EngineBroken: it does not run, or is not a llama-server.
    """
    boot_id = _BOOT_ID.read_text("utf-8") if _BOOT_ID.is_file() else ""
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_OF_DEVICES))
    chosen = [f"{name}={value}" for name, value in variables]
    key = files.key_of([path], *map(str, library_dirs), boot_id, *chosen)
    match files.get(cache_dir / "engines", key):
        case {"output": [str(version), str(text), str(devices), str(subcommand)]}:
            return version, text, devices, subcommand
    found = _probe(path, library_dirs, limit_s)
    files.put(cache_dir / "engines", key, {"output": found})
    return found


def _probe(path: Path, library_dirs: Sequence[Path], limit_s: float) -> ProbeOutput:
    done = run_program([str(path), "--help"], library_dirs, limit_s)
    subcommand = _SERVE if is_unified(_text(done)) else ""
    command = [str(path), *filter(None, [subcommand])]
    if subcommand:
        done = run_program([*command, "--help"], library_dirs, limit_s)
    text = _output(done)
    if not _is_server(text):
        raise EngineBroken(
            f"{path} runs, but its --help is not that of llama-server",
            hint="give the path of llama-server or of llama.cpp's llama, not of another program",
        )
    version, devices = (
        _output(run_program([*command, option], library_dirs, limit_s))
        for option in ("--version", "--list-devices")
    )
    return version, text, devices, subcommand


def is_unified(output: str) -> bool:
    """Return whether a program whose `--help` printed this may be llama.cpp's unified program."""
    has_command = _KNOWS_NO_HELP in output or _LISTS_SERVE.search(output) is not None
    return has_command and not _is_server(output)


def _is_server(text: str) -> bool:
    return "--ctx-size" in text and "--port" in text


def list_devices(command: Sequence[str], library_dirs: Sequence[Path], limit_s: float) -> str:
    """Return an engine's current output of `--list-devices`; raises as `probe`."""
    return _output(run_program([*command, "--list-devices"], library_dirs, limit_s))


def environment(
    environ: Mapping[str, str], program: Path, library_dirs: Sequence[Path]
) -> dict[str, str]:
    """Remove llama.cpp's variables, and put the directories first on the library path."""
    env = {name: value for name, value in environ.items() if not name.startswith("LLAMA_")}
    return env | library_path(env, program, library_dirs)


def run_program(
    argv: Sequence[str], library_dirs: Sequence[Path], limit_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of an engine; raises EngineBroken if it does not start or end in time."""
    try:
        return subprocess.run(
            argv,
            env=environment(os.environ, Path(argv[0]), library_dirs),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=limit_s,
            creationflags=creation_flags(),
        )
    except OSError as error:
        raise _start_error(argv[0], error) from error
    except subprocess.TimeoutExpired as error:
        raise EngineBroken(
            f"{' '.join(argv)} did not finish within {limit_s:g} s",
            hint="run it manually: a GPU driver may be stuck",
        ) from error


def _output(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the output of a command; raises EngineBroken if it failed."""
    if done.returncode:
        raise _probe_error(done.args, done.returncode, _text(done, first="stderr"))
    return _text(done)


def _text(
    done: subprocess.CompletedProcess[bytes], first: Literal["stdout", "stderr"] = "stdout"
) -> str:
    """Return the output of `first`, or of the other stream if that is empty.

    Old builds print their version to stderr.
    """
    found = [part[:_OUTPUT_MAX].decode("utf-8", "replace") for part in (done.stdout, done.stderr)]
    stdout, stderr = found
    ordered = (stdout, stderr) if first == "stdout" else (stderr, stdout)
    return next(filter(str.strip, ordered), "")


def _start_error(path: str, error: OSError) -> EngineBroken:
    if isinstance(error, PermissionError):
        return EngineBroken(f"{path} is not executable", hint=f"chmod +x {path}")
    is_there = isinstance(error, FileNotFoundError) and Path(path).exists()
    hint = _NO_LOADER if is_there else _WRONG_MACHINE
    return EngineBroken(f"{path} cannot be executed: {error.strerror}", hint=hint)


def _probe_error(argv: Sequence[str], returncode: int, output: str) -> EngineBroken:
    first_line = next((line.strip() for line in output.splitlines() if line.strip()), "no output")
    if hint := _library_hint(output):
        return EngineBroken(f"{argv[0]} does not run: {first_line}", hint=hint)
    if returncode == -signal.SIGILL:
        return EngineBroken(
            f"{argv[0]} died of an illegal instruction: it was compiled for a newer processor",
            hint="corral engine build newest compiles one for this processor",
        )
    how = f"died of signal {-returncode}" if returncode < 0 else f"exited with {returncode}"
    return EngineBroken(f"{' '.join(argv)} {how}: {first_line}", hint=_WRONG_MACHINE)


def _library_hint(output: str) -> str | None:
    """Advise on a library that is missing or too old; None if no library is the cause."""
    if found := _TOO_OLD.search(output):
        return (
            f"this system is older than the program, which needs {found[1]} {found[2]}: take an "
            "older build, or compile one with corral engine build newest"
        )
    if "shared librar" not in output:
        return None
    found = _LIBRARY.search(output)
    package = _PACKAGES.get(found[1]) if found else None
    where = f" (on Debian and Ubuntu the package {package})" if package else ""
    return f"install this library{where}, or add its directory to LD_LIBRARY_PATH"
