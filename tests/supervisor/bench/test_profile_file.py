from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.bench.tune_space import undo, write
from supervisor.errors import AccessDenied, SettingsInvalid

OURS = "[tuned]\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "profiles.d"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_first_profile_is_written_and_removed_again(directory: Path) -> None:
    path, backup = write("chat", directory, OURS)
    assert (path.read_text(), backup) == (OURS, None)
    assert (path.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
    assert undo("chat", directory)[1] is None
    assert names(directory) == []


def test_each_write_keeps_the_old_content_and_each_undo_restores_it(directory: Path) -> None:
    backups = [write("chat", directory, f"# {number}\n{OURS}")[1] for number in range(3)]
    assert backups == [None, directory / "chat.toml.1", directory / "chat.toml.2"]
    path = directory / "chat.toml"
    assert names(directory) == ["chat.toml", "chat.toml.1", "chat.toml.2"]
    seen = []
    for _ in range(2):
        undo("chat", directory)
        seen.append(path.read_text().splitlines()[0])
    assert seen == ["# 1", "# 0"]
    undo("chat", directory)
    with pytest.raises(SettingsInvalid, match="nothing to undo: chat has no tuned profile"):
        undo("chat", directory)


def test_a_file_of_the_users_own_is_kept_and_never_removed(directory: Path) -> None:
    directory.mkdir()
    own = directory / "chat.toml"
    own.write_text("[flags]\nthreads = 3\n")
    with pytest.raises(SettingsInvalid, match="was not written by corral tune"):
        undo("chat", directory)
    write("chat", directory, OURS)
    undo("chat", directory)
    assert own.read_text() == "[flags]\nthreads = 3\n"


def test_a_broken_file_can_be_removed(directory: Path) -> None:
    directory.mkdir()
    (directory / "chat.toml").write_text("nonsense")
    undo("chat", directory)
    assert names(directory) == []


def test_backups_of_other_models_and_other_files_are_left_alone(directory: Path) -> None:
    write("chat", directory, OURS)
    others = ["chat.toml.old", "chat2.toml.7", "chat.toml.1x", "chat.toml.1.2"]
    for name in others:
        (directory / name).write_text("mine")
    undo("chat", directory)
    assert names(directory) == sorted(others)


def test_no_more_than_ten_backups_are_kept(directory: Path) -> None:
    for _ in range(15):
        write("chat", directory, OURS)
    assert len(names(directory)) == 11
    assert "chat.toml.14" in names(directory)


def test_a_failed_write_changes_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write("chat", directory, OURS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("supervisor.system.files.os.fsync", full)
    with pytest.raises(AccessDenied, match="No space left on device"):
        write("chat", directory, "other")
    assert path.read_text() == OURS
    undo("chat", directory)
    assert path.read_text() == OURS


@pytest.mark.parametrize("name", ["../chat", "a/b", "..", ".x"])
def test_a_name_never_leads_out_of_the_directory(directory: Path, name: str) -> None:
    path, _ = write(name, directory, OURS)
    assert path.parent == directory
    assert [*directory.parent.rglob("*.toml")] == [path]
