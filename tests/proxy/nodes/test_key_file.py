"""The file with the key of a node."""

from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.nodes.key_file import read_key


def write(directory: Path, text: bytes, mode: int = 0o600) -> Path:
    path = directory / "key"
    path.touch(mode)
    path.write_bytes(text)
    return path


def test_the_key_is_the_one_line_of_the_file(tmp_path: Path) -> None:
    assert read_key(write(tmp_path, b"sk-1234\n")) == "sk-1234"


@pytest.mark.parametrize("text", [b"", b"\n", b"one two", b"one\ntwo", b"\xff", b"a\0b"])
def test_what_is_no_key_is_not_repeated(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="does not hold one key") as error:
        read_key(write(tmp_path, text))
    assert "one line" in error.value.hint


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, b"sk-1234", mode)
    with pytest.raises(ConfigError, match="open to others") as error:
        read_key(path)
    assert error.value.hint == f"chmod 600 {path}"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing cannot be read: No such file") as error:
        read_key(tmp_path / "nothing")
    assert "key_file" in error.value.hint


def test_a_key_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 4096 bytes"):
        read_key(write(tmp_path, b"x" * 5000))
