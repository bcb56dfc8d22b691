"""Measured speeds on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.samples import machine

from supervisor.engine.calibration import MeasurementStore
from supervisor.plan.auto import ThreadSpeeds

FAST, SLOW = ThreadSpeeds(135.0, 460.0, 294.0), ThreadSpeeds(32.0, 850.0, None)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("model.gguf", "llama-server"):
        (tmp_path / name).write_bytes(b"content")
    return tmp_path / "model.gguf", tmp_path / "llama-server"


def store(files: tuple[Path, Path], cores: int = 2) -> MeasurementStore:
    model, engine = files
    return MeasurementStore(model.parent / "cache", model, engine, machine(physical_cores=cores))


def test_speeds_add_up_until_they_are_forgotten(files: tuple[Path, Path]) -> None:
    assert store(files).read() == {}
    store(files).add(2, SLOW)
    store(files).add(1, FAST)
    assert store(files).read() == {2: SLOW, 1: FAST}
    store(files).forget()
    assert store(files).read() == {}


def test_another_machine_or_a_changed_file_has_none(files: tuple[Path, Path]) -> None:
    store(files).add(2, SLOW)
    assert store(files, cores=4).read() == {}
    files[0].write_bytes(b"another model")
    assert store(files).read() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"speeds": 1}', '{"speeds": {"x": {}}}'])
def test_an_unreadable_file_counts_as_none(files: tuple[Path, Path], text: str) -> None:
    store(files).add(2, SLOW)
    (found,) = (files[0].parent / "cache" / "thread_speeds").iterdir()
    found.write_text(text)
    assert store(files).read() == {}


def test_a_missing_model_has_none(files: tuple[Path, Path]) -> None:
    files[0].unlink()
    assert store(files).read() == {}
