from pathlib import Path

import pytest

from proxy.auth.keys_file import read_checked
from proxy.errors import ConfigError


def read(path: Path) -> bytes:
    return read_checked(path, "the keys file", 100, missing="", wrong="")[0]


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.touch(mode)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        read(path)


def test_a_credential_may_have_an_access_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"secret")
    path.chmod(0o440)  # the mode that stat(2) shows for a file with an access list
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read(path) == b"secret"
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="open to others"):
        read(path)
    path.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="open to others"):
        read(path)
