from pathlib import Path

import pytest

from supervisor.host.files import write_atomic


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
