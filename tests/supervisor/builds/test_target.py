from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.builds.variant import Target, nvidia_driver, this_machine
from supervisor.errors import EngineMissing


class Driver:
    """NVML of a driver of this version."""

    def __init__(self, version: bytes, status: int = 0) -> None:
        self._version = version
        self._status = status

    def __getattr__(self, function: str) -> Callable[..., int]:
        functions: dict[str, Callable[..., int]] = {
            "nvmlInit_v2": lambda: 0,
            "nvmlSystemGetDriverVersion": self._read,
        }
        if function not in functions:
            raise AttributeError(function)
        return functions[function]

    def _read(self, text: Any, length: int) -> int:
        assert length == 80
        ctypes.memmove(text, self._version, len(self._version))
        return self._status


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Target]:
    def made(system: str, processor: str, driver: Driver | None = None) -> Target:
        monkeypatch.setattr("platform.system", lambda: system)
        monkeypatch.setattr("platform.machine", lambda: processor)
        monkeypatch.setattr("supervisor.system.energy.load_nvml", lambda: driver)
        return this_machine(tmp_path)

    return made


def test_the_driver_tells_its_version() -> None:
    assert nvidia_driver(Driver(b"580.82.07")) == 580
    assert nvidia_driver(Driver(b"580.82.07", status=9)) is None
    assert nvidia_driver(Driver(b"unknown")) is None
    assert nvidia_driver(object()) is None  # a driver without functions


def test_a_machine_is_named_as_releases_do(machine: Callable[..., Target], tmp_path: Path) -> None:
    assert machine("Linux", "x86_64") == Target("ubuntu", "x64")
    assert machine("Darwin", "arm64") == Target("macos", "arm64")
    found = machine("Linux", "aarch64", Driver(b"575.1"))
    assert found == Target("ubuntu", "arm64", nvidia_driver=575, has_gpu=True)
    (tmp_path / "renderD128").touch()
    assert machine("Linux", "x86_64").has_gpu


def test_a_machine_without_releases_is_told(machine: Callable[..., Target]) -> None:
    with pytest.raises(EngineMissing, match="no build for FreeBSD on amd64"):
        machine("FreeBSD", "amd64")
    with pytest.raises(EngineMissing, match="riscv64"):
        machine("Linux", "riscv64")
