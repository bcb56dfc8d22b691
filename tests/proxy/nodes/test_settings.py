"""The file with the key of a node."""

from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.nodes.configured import read_key


def write(directory: Path, text: bytes, mode: int = 0o600) -> Path:
    path = directory / "key"
    path.touch(mode)
    path.write_bytes(text)
    return path


def test_the_file_contains_the_key_on_one_line(tmp_path: Path) -> None:
    assert read_key(write(tmp_path, b"sk-1234\n")) == "sk-1234"


@pytest.mark.parametrize("text", [b"", b"\n", b"one two", b"one\ntwo", b"\xff", b"a\0b"])
def test_a_file_without_exactly_one_key_is_rejected(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="does not hold one key") as error:
        read_key(write(tmp_path, text))
    assert "one line" in error.value.hint


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_is_open_to_others_is_rejected(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, b"sk-1234", mode)
    with pytest.raises(ConfigError, match="open to others") as error:
        read_key(path)
    assert error.value.hint == f"chmod 600 {path}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing cannot be read: No such file") as error:
        read_key(tmp_path / "nothing")
    assert "key_file" in error.value.hint


def test_a_file_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 4096 bytes"):
        read_key(write(tmp_path, b"x" * 5000))
