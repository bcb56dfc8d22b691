from __future__ import annotations

from pathlib import Path

from supervisor.system import files


def test_a_value_is_read_back(tmp_path: Path) -> None:
    files.put(tmp_path / "new", "key", {"a": 1})
    assert files.get(tmp_path / "new", "key") == {"a": 1}
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()] == [0o600]


def test_an_unknown_key_is_none(tmp_path: Path) -> None:
    assert files.get(tmp_path, "key") is None


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    for content in (b"\xff", b"{", b"[]"):
        (tmp_path / "key.json").write_bytes(content)
        assert files.get(tmp_path, "key") is None


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "key.json").mkdir()
    files.put(tmp_path, "key", {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_a_key_changes_with_the_file_and_the_texts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    first = files.key_of([file], "x")
    assert files.key_of([file], "x") == first
    assert files.key_of([file], "y") != first
    file.write_text("ab")
    assert files.key_of([file], "x") != first
