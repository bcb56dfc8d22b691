from pathlib import Path

import pytest

from supervisor.system.files import back_up, rewrite, write_atomic


@pytest.mark.parametrize("durable", [True, False])
def test_a_written_file_is_private_and_replaces_the_old_one(
    tmp_path: Path, *, durable: bool
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_atomic(path, "new", durable=durable)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(path, "new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_backup_has_the_bytes_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b'{\r\n  "a": "\xff"\r\n}\n')
    assert back_up(path).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        (b"a\r\nb\r\n", "a\r\nb\nc\n", b"a\r\nb\r\nc\r\n"),
        (b"a\nb\r\n", "a\nb\r\nc\n", b"a\nb\r\nc\n"),
        (b"a\n", "a\nc\n", b"a\nc\n"),
    ],
)
def test_a_rewritten_file_keeps_its_line_ends(
    tmp_path: Path, before: bytes, text: str, after: bytes
) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(before)
    rewrite(path, text)
    assert path.read_bytes() == after
