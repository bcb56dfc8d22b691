"""A projector is taken if there is no doubt that it is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stores_layout import copied

from supervisor.models import metadata
from supervisor.models.stored_model import find_projector
from supervisor.plan.embedding import needs_projector_search

Files = dict[str, Path]


def chosen(tmp_path: Path, files: Files, model: str, *others: str) -> str | None:
    path = copied(files["model"], tmp_path / "m" / model)
    for name in others:
        kind = "clip" if "mmproj" in name else "model"
        copied(files[kind], tmp_path / "m" / name)
    gguf = metadata.read(path, cache_dir=tmp_path / "cache")
    found, _ = find_projector(gguf, tmp_path / "cache")
    return str(found.relative_to(tmp_path / "m")) if found else None


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("tiny-Q4_K_M.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("tiny-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("tiny-Q4_K_M.gguf", ["mmproj-tiny-F16.gguf", "other.gguf"], "mmproj-tiny-F16.gguf"),
        ("tiny-Q4_K_M.gguf", ["tiny.mmproj-f16.gguf", "other.gguf"], "tiny.mmproj-f16.gguf"),
        ("tiny-UD-Q4_K_XL.gguf", ["tiny-Q8_0.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        ("tiny-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("Q4_K_M/tiny-Q4_K_M.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        # Another model's, or it cannot be told whose.
        ("tiny-Q4_K_M.gguf", ["mmproj-other-F16.gguf"], None),
        ("tiny-Q4_K_M.gguf", ["mmproj-F16.gguf", "other-Q4_K_M.gguf"], None),
        ("deep/tiny-Q4_K_M.gguf", ["mmproj-F16.gguf"], None),
        ("tiny-Q4_K_M.gguf", [], None),
    ],
)
def test_names_decide(
    tmp_path: Path, files: Files, model: str, others: list[str], expected: str | None
) -> None:
    assert chosen(tmp_path, files, model, *others) == expected


def test_a_projector_for_another_width_is_not_taken(tmp_path: Path, files: Files) -> None:
    copied(files["wide_clip"], tmp_path / "m" / "mmproj-tiny-F16.gguf")
    assert chosen(tmp_path, files, "tiny-Q4_K_M.gguf") is None


def test_a_broken_projector_is_told_and_left_out(tmp_path: Path, files: Files) -> None:
    path = copied(files["model"], tmp_path / "tiny-Q4_K_M.gguf")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    gguf = metadata.read(path, cache_dir=tmp_path / "cache")
    found, skipped = find_projector(gguf, tmp_path / "cache")
    assert found is None
    assert "not a projector for tiny-Q4_K_M.gguf" in skipped[0]


@pytest.mark.parametrize(
    ("flags", "args", "expected"),
    [
        ({}, (), True),
        ({"mmproj": "a.gguf"}, (), False),
        ({"mmproj-auto": False}, (), False),
        ({}, ("--no-mmproj",), False),
        ({}, ("-mm", "a.gguf"), False),
        ({}, ("--mmproj=a.gguf",), False),
    ],
)
def test_the_user_may_decide(
    tmp_path: Path,
    files: Files,
    flags: dict[str, object],
    args: tuple[str, ...],
    *,
    expected: bool,
) -> None:
    model = metadata.read(files["model"], cache_dir=tmp_path / "cache")
    assert needs_projector_search(model, flags, args) is expected
