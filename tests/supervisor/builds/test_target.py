from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import nvml_library
from support.nvml_library import Library

from supervisor.builds.variant import Target, this_machine
from supervisor.errors import EngineMissing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Target]:
    def made(system: str, processor: str, driver: Library | None = None) -> Target:
        monkeypatch.setattr("platform.system", lambda: system)
        monkeypatch.setattr("platform.machine", lambda: processor)
        monkeypatch.setattr("supervisor.system.devices.load_nvml", lambda: None)
        if driver:
            nvml_library.install(monkeypatch, driver)
        return this_machine(tmp_path)

    return made


def test_the_driver_tells_its_version(machine: Callable[..., Target]) -> None:
    assert machine("Linux", "x86_64", Library()).nvidia_driver == 580
    unloaded = Library(fault="nvmlInitWithFlags", error=nvml_library.NOT_LOADED)
    assert machine("Linux", "x86_64", unloaded).nvidia_driver is None
    old = Library(missing="nvmlSystemGetDriverVersion")
    assert machine("Linux", "x86_64", old).nvidia_driver is None


def test_a_machine_is_named_as_releases_do(machine: Callable[..., Target], tmp_path: Path) -> None:
    assert machine("Linux", "x86_64") == Target("ubuntu", "x64")
    assert machine("Darwin", "arm64") == Target("macos", "arm64")
    found = machine("Linux", "aarch64", Library())
    assert found == Target("ubuntu", "arm64", nvidia_driver=580, has_gpu=True)
    (tmp_path / "renderD128").touch()
    assert machine("Linux", "x86_64").has_gpu


def test_a_machine_without_releases_is_told(machine: Callable[..., Target]) -> None:
    with pytest.raises(EngineMissing, match="no build for FreeBSD on amd64"):
        machine("FreeBSD", "amd64")
    with pytest.raises(EngineMissing, match="riscv64"):
        machine("Linux", "riscv64")
