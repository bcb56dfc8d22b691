"""Spawning on systems that are not at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from supervisor.builds import probe
from supervisor.builds.probe import creation_flags, library_path
from supervisor.engine import child, launch
from supervisor.engine.client import Endpoint
from supervisor.engine.launch import clean_environment

ENGINE = Path("/opt/llama/llama-server")


def test_on_macos_an_engine_finds_the_libraries_beside_it() -> None:
    """Seed 002: DYLD_LIBRARY_PATH is the engine's directory, before its earlier value."""
    assert library_path({}, ENGINE, (), "darwin") == {"DYLD_LIBRARY_PATH": "/opt/llama"}
    environ = {"DYLD_LIBRARY_PATH": "/own", "LD_LIBRARY_PATH": "/other"}
    assert library_path(environ, ENGINE, [Path("/a")], "darwin") == {
        "DYLD_LIBRARY_PATH": "/a:/opt/llama:/own"
    }


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_elsewhere_only_directories_that_were_asked_for_are_added(platform: str) -> None:
    assert library_path({}, ENGINE, (), platform) == {}
    assert library_path({"LD_LIBRARY_PATH": "/own"}, ENGINE, [Path("/a")], platform) == {
        "LD_LIBRARY_PATH": "/a:/own"
    }


def test_an_engine_is_launched_and_probed_with_that_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 002: the library path on macOS."""
    for module in (launch, probe):
        monkeypatch.setattr(module, "library_path", on_macos)
    environ = {"DYLD_LIBRARY_PATH": "/own"}
    launched = clean_environment(environ, program=ENGINE, library_dirs=(), api_key="", marker="")
    probed = probe.environment(environ, ENGINE, [])
    assert launched["DYLD_LIBRARY_PATH"] == probed["DYLD_LIBRARY_PATH"] == "/opt/llama:/own"


def on_macos(
    environ: Mapping[str, str], program: Path, library_dirs: Iterable[Path]
) -> dict[str, str]:
    return library_path(environ, program, library_dirs, "darwin")


def test_on_windows_an_engine_gets_no_console_window() -> None:
    """Seed 002: CREATE_NO_WINDOW, which Python has as a constant on Windows only."""
    assert creation_flags("win32") == 0x08000000
    assert creation_flags("linux") == creation_flags("darwin") == 0


@pytest.mark.parametrize("module", [child, probe])
def test_the_flag_is_given_to_every_spawn_of_an_engine(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 002: no console window, neither for a run nor for a probe."""
    monkeypatch.setattr(module, "creation_flags", lambda: creation_flags("win32"))
    with pytest.raises(ValueError, match="creationflags is only supported on Windows"):
        spawn(module)


def spawn(module: object) -> None:
    if module is child:
        here = Path("/")
        run = launch.Launch((sys.executable,), {}, here, Endpoint(), "", here)
        child.Child.spawn(run)
    else:
        probe.list_devices([sys.executable], (), 5)
