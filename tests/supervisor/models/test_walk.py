"""A walk ends, whatever the directory tree is."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from supervisor.models.stored_model import walk_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/one.gguf", "a/b/two.gguf", "three.gguf", ".hidden/four.gguf"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "tree"


def names(root: Path, notes: list[str] | None = None, **limits: Any) -> list[str]:
    found = walk_files(root, [] if notes is None else notes, **limits)
    return [str(path.relative_to(root)) for path in found]


def test_files_come_by_name_without_hidden_ones(tree: Path) -> None:
    assert names(tree) == ["a/b/two.gguf", "a/one.gguf", "three.gguf"]


def test_a_loop_of_links_is_walked_once(tree: Path) -> None:
    (tree / "a" / "again").symlink_to(tree)
    (tree / "self").symlink_to("self")
    notes = list[str]()
    assert names(tree, notes) == ["a/b/two.gguf", "a/one.gguf", "self", "three.gguf"]
    assert notes == []


def test_a_directory_behind_a_link_is_searched(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "five.gguf").touch()
    (tree / "linked").symlink_to(tmp_path / "more")
    assert "linked/five.gguf" in names(tree)


@pytest.mark.parametrize(
    ("limits", "seen", "note"),
    [
        ({"max_entries": 2}, [], "after 2 files"),
        ({"max_depth": 0}, ["three.gguf"], "more than 0 levels"),
        ({"max_s": 2.5}, [], "after 2.5 s"),
    ],
)
def test_each_limit_is_noted(
    tree: Path, limits: dict[str, Any], seen: list[str], note: str
) -> None:
    seconds = itertools.count()
    notes = list[str]()
    assert names(tree, notes, **limits, clock=lambda: float(next(seconds))) == seen
    assert any(note in line for line in notes)


def test_a_link_into_a_closed_directory_is_no_directory(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.is_dir raises there."""

    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert "three.gguf" in names(tree)


def test_an_unreadable_directory_is_noted_and_a_missing_one_is_empty(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("supervisor.models.stored_model.os.scandir", refuse)
    notes = list[str]()
    assert names(tree, notes) == []
    assert notes == [f"{tree} cannot be read: Permission denied"]
    assert names(tree / "gone") == []
