"""The `ggml-rpc-server` beside an engine, and its command line."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.engines.discover import Engine
from supervisor.engines.probe import environment
from supervisor.errors import EngineBroken, EngineMissing

# Today's name first. Source: llama.cpp, tools/rpc/CMakeLists.txt, and its history.
_NAMES: Final = ("ggml-rpc-server", "rpc-server", "llama-rpc-server")
_LIMIT_S: Final = 20.0
_OPTION: Final = re.compile(r"--[a-z]+")
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A program that serves RPC, and the options that its help lists."""

    path: Path
    library_dirs: tuple[Path, ...]
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is started with; None and False leave the program's own default."""

    host: str
    port: int
    threads: int | None = None
    device: str | None = None
    cache: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A command line, and a clause for each option that this build does not have."""

    argv: tuple[str, ...]
    dropped: tuple[str, ...]


def find(engine: Engine) -> WorkerProgram:
    """Find the program beside an engine, and read its help.

    Raises:
        EngineMissing: The engine came without it.
        EngineBroken: It does not run.
    """
    found = [one for name in _NAMES if (one := engine.path.with_name(name)).is_file()]
    if not found:
        raise EngineMissing(
            f"the engine {engine.path} has no {_NAMES[0]} beside it",
            hint='pip install ".[engine]" in the clone has one; a build of llama.cpp needs '
            "-DGGML_RPC=ON",
        )
    text = _help(found[0], engine.library_dirs)
    return WorkerProgram(found[0], engine.library_dirs, frozenset(_OPTION.findall(text)))


def command(program: WorkerProgram, options: WorkerOptions) -> WorkerCommand:
    """Render a command line for the build at hand."""
    wanted = dict(_wanted(options))
    known = {name: value for name, value in wanted.items() if name in program.options}
    words = (word for name, value in known.items() for word in (name, value) if word is not None)
    return WorkerCommand(
        argv=(str(program.path), *words),
        dropped=tuple(
            f"this build's {program.path.name} has no {name}"
            for name in wanted
            if name not in known
        ),
    )


def _wanted(options: WorkerOptions) -> Iterator[tuple[str, str | None]]:
    yield "--host", options.host
    yield "--port", str(options.port)
    if options.threads:
        yield "--threads", str(options.threads)
    if options.device:
        yield "--device", options.device
    if options.cache:
        yield "--cache", None
    if options.memory_bytes:
        yield "--mem", str(options.memory_bytes // _MIB)


def _help(path: Path, library_dirs: tuple[Path, ...]) -> str:
    env: Mapping[str, str] = environment(os.environ, path, library_dirs)
    try:
        done = subprocess.run(
            [path, "--help"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineBroken(f"{path} does not run: {error}") from error
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if "--host" not in text or "--port" not in text:
        raise EngineBroken(
            f"{path} runs, but its --help is not that of ggml-rpc-server",
            hint="set engine to a llama-server with its own ggml-rpc-server beside it",
        )
    return text
