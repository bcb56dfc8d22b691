"""Every way in which an installation ends: an engine that runs, or an error and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engine_program import engine_program
from support.release_server import ReleaseServer, engine_archive, member, tar_of, zip_of

from supervisor.builds.discover import Engine
from supervisor.builds.install import install
from supervisor.builds.installed import InstalledBuild, find_build, installed_builds, lock_builds
from supervisor.builds.releases import ReleaseApi, new_client
from supervisor.builds.variant import Target, choose
from supervisor.errors import CorralError, DiskFull, DownloadFailed, EngineBroken
from supervisor.system.download import HttpClient

TAG = "b11000"
NAME = f"llama-{TAG}-bin-ubuntu-x64.tar.gz"
CUDA = f"llama-{TAG}-bin-ubuntu-cuda-12.8-x64.tar.gz"
TARGET = Target("ubuntu", "x64")

Install = Callable[..., tuple[InstalledBuild, Engine]]


@pytest.fixture
def server() -> Iterator[ReleaseServer]:
    with ReleaseServer().serving() as server:
        server.releases[TAG] = {NAME: engine_archive(TAG, engine_program(11000))}
        yield server


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return tmp_path / "data" / "engines"


@pytest.fixture
def run(server: ReleaseServer, engines: Path) -> Install:
    """Installs the release, into a directory that afterwards has no half of anything."""

    def run(
        variant: str = "cpu", mirror: str | None = None, *, parts: bool = False
    ) -> tuple[InstalledBuild, Engine]:
        try:
            with new_client() as client, lock_builds(engines):
                release = ReleaseApi(client, server.api, {}).find(TAG)
                choice = choose(release, TARGET, variant)
                unhurried = HttpClient(client, lambda _: None)
                return install(choice, engines, unhurried, mirror, lambda *_: None)
        finally:
            left = {path.name for path in engines.iterdir() if path.name.startswith(".")}
            assert left - {".lock"} == ({".downloads"} if parts else set())

    return run


def failing(run: Install, engines: Path, **options: object) -> CorralError:
    with pytest.raises(CorralError) as found:
        run(**options)
    assert installed_builds(engines) == ()
    return found.value


def test_a_build_is_there_once_it_has_run(run: Install, engines: Path) -> None:
    done = run()
    assert done[1].build == 11000
    found = find_build("b11000", engines)
    assert (found.name, found.variant, found.binary) == ("b11000-cpu", "cpu", "llama-server")
    assert list(found.archives) == [NAME]
    files = engines / "b11000-cpu" / "files"
    assert found.path(engines).is_relative_to(files)
    assert sorted(path.name for path in files.iterdir()) == [
        "LICENSE",
        "libllama.so",
        "libllama.so.0",
        "libllama.so.0.1.0",
        "llama-server",
    ]


def test_a_build_brings_the_libraries_that_it_needs(
    run: Install, server: ReleaseServer, engines: Path
) -> None:
    libraries = tar_of((member("LICENSE"), b"CUDA's"), (member("libcudart.so.12"), b"runtime"))
    server.releases[TAG] = {
        CUDA: engine_archive(TAG, engine_program(11000)),
        f"cudart-{CUDA}": libraries,
    }
    run("cuda")
    files = engines / "b11000-cuda-12.8" / "files"
    assert (files / "libcudart.so.12").read_bytes() == b"runtime"
    assert (files / "LICENSE").read_bytes() == b"MIT"


def test_an_old_release_is_a_zip(run: Install, server: ReleaseServer, engines: Path) -> None:
    old = zip_of(
        ("build/bin/llama-server", 0o100755, engine_program(11000)),
        ("build/bin/LICENSE", 0o100644, b"MIT"),
    )
    server.releases[TAG] = {NAME.replace(".tar.gz", ".zip"): old}
    assert run()[0].path(engines).is_file()


def test_a_mirror_of_the_files(run: Install, server: ReleaseServer) -> None:
    run(mirror=f"{server.url}/storage")
    assert server.requests[-1][0] == f"/storage/{TAG}/{NAME}"


def test_a_connection_that_breaks_is_continued_by_the_next_command(
    run: Install, server: ReleaseServer, engines: Path
) -> None:
    server.faults.cuts = [100] * 5
    assert isinstance(failing(run, engines, parts=True), DownloadFailed)
    server.faults.cuts = []
    run()
    assert str(server.ranges[-1]).startswith("bytes=100-")


def test_a_wrong_digest(run: Install, server: ReleaseServer, engines: Path) -> None:
    server.faults.sha256 = "0" * 64
    assert "SHA-256" in failing(run, engines).message


def test_a_release_without_digests(run: Install, server: ReleaseServer, engines: Path) -> None:
    server.faults.sha256 = ""
    assert "does not say the SHA-256" in failing(run, engines).message
    assert server.ranges == []


@pytest.mark.parametrize(
    "content",
    [
        tar_of((member("llama/../../../../evil"), b"x")),
        tar_of((member("llama/a", kind=tarfile.SYMTYPE, to="/etc"), b"")),
        tar_of((member("llama/zeros"), bytes(65 * 1024**2))),
    ],
    ids=["above", "link", "bomb"],
)
def test_an_archive_that_is_not_safe(
    run: Install, server: ReleaseServer, engines: Path, content: bytes
) -> None:
    server.releases[TAG] = {NAME: content}
    assert "is refused" in failing(run, engines).message
    assert not list(engines.parent.rglob("evil"))


def _failing(message: str) -> bytes:
    return f"#!/bin/sh\ncat >&2 <<'EOF'\nllama-server: {message}\nEOF\nexit 127\n".encode()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (b"#!/nowhere/sh\n", "cannot be executed"),
        (b"#!/bin/sh\nkill -ILL $$\n", "illegal instruction"),
        (b"#!/bin/sh\necho hello\n", "its --help is not that of llama-server"),
        (
            _failing(
                "error while loading shared libraries: libgomp.so.1: cannot open shared object"
            ),
            "libgomp.so.1",
        ),
        (
            _failing("/lib/libc.so.6: version `GLIBC_2.38' not found (required by libllama.so)"),
            "GLIBC_2.38",
        ),
    ],
)
def test_an_engine_that_cannot_run_here(
    run: Install, server: ReleaseServer, engines: Path, program: bytes, reason: str
) -> None:
    server.releases[TAG] = {NAME: engine_archive(TAG, program)}
    error = failing(run, engines)
    assert isinstance(error, EngineBroken)
    assert "b11000-cpu cannot run on this machine, so it is not installed" in error.message
    assert reason in error.message
    assert ".new" not in error.message
    assert error.hint


def test_a_release_without_an_engine(run: Install, server: ReleaseServer, engines: Path) -> None:
    server.releases[TAG] = {NAME: tar_of((member("llama/LICENSE"), b"MIT"))}
    assert "neither llama-server nor llama" in failing(run, engines).message


def test_a_full_disk(run: Install, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    error = failing(run, engines)
    assert isinstance(error, DiskFull)
    assert "100 B free" in error.message


def test_a_disk_that_fills_up_keeps_the_download(
    run: Install, engines: Path, server: ReleaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("supervisor.builds.install.write_build", full)
        error = failing(run, engines, parts=True)
    assert isinstance(error, DiskFull)
    assert [path.name for path in (engines / ".downloads").iterdir()] == [NAME]
    run()
    assert len(server.ranges) == 1


def test_what_a_killed_command_left_is_removed(run: Install, engines: Path) -> None:
    for name in (".new-b11000-cpu", ".removed-b9000-cpu"):
        (engines / name / "files").mkdir(parents=True)
    run()


def test_ctrl_c_leaves_a_part_alone(
    server: ReleaseServer, run: Install, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(parts=True)
    assert [path.suffix for path in (engines / ".downloads").iterdir()] == [".part"]
