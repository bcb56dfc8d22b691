"""Which settings files are trusted."""

import os
from pathlib import Path

import pytest

from supervisor.settings.load import load
from supervisor.system import ownership
from supervisor.system.ownership import Access, first_doubt

ME = (1000, 1000)  # with a group of its own
CHAT = '[models.chat]\npath = "chat.gguf"\n'


def access(uid: int = 1000, mode: int = 0o644, gid: int = 1000) -> Access:
    return "it", uid, gid, mode


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (access(), None),
        (access(uid=0), None),
        (access(mode=0o664), None),  # umask 002, and a group of one's own
        (access(uid=65534), "belongs to another user"),
        (access(mode=0o666), "everybody can write it"),
        (access(mode=0o1777), "everybody can write it"),  # sticky, as /tmp is
        (access(mode=0o664, gid=100), "a group can write it"),
    ],
)
def test_a_file_that_others_can_write_is_not_trusted(place: Access, reason: str | None) -> None:
    found = first_doubt((access(), place), *ME)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_root_has_no_private_group_and_trusts_only_itself() -> None:
    assert first_doubt((("it", 0, 0, 0o664),), 0, None)
    assert first_doubt((("it", 1000, 1000, 0o644),), 0, None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "project"
    directory.mkdir(mode=0o700)
    monkeypatch.chdir(directory)
    (directory / "corral.toml").write_text(CHAT, "utf-8")
    (directory / "corral.toml").chmod(0o644)
    return directory


def found(tmp_path: Path) -> Path | None:
    return load(config_dir=tmp_path / "config", environ={}).path


def test_a_file_of_ours_in_a_directory_of_ours_is_read(here: Path, tmp_path: Path) -> None:
    assert found(tmp_path) == here / "corral.toml"


@pytest.mark.parametrize("name", ["corral.toml", "."])
def test_a_file_that_others_can_write_is_ignored_with_a_warning(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (here / name).chmod(0o777)
    assert found(tmp_path) is None
    reason = capsys.readouterr().err
    assert str(here / "corral.toml") in reason
    assert "everybody can write" in reason
    assert "--config" in reason


def test_a_symlink_is_judged_by_its_target(here: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "shared"
    elsewhere.mkdir()
    (here / "corral.toml").replace(elsewhere / "theirs.toml")
    (here / "corral.toml").symlink_to(elsewhere / "theirs.toml")
    assert found(tmp_path) == here / "corral.toml"
    elsewhere.chmod(0o777)
    assert found(tmp_path) is None


def test_a_named_file_is_read_with_a_warning(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "corral.toml"
    path.chmod(0o666)
    assert load(path, config_dir=tmp_path, environ={}).path == path
    assert load(config_dir=tmp_path, environ={"CORRAL_CONFIG": str(path)}).path == path
    assert "may have been changed by others: everybody can write it" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["corral.toml", "."])
def test_a_file_of_another_user_is_ignored(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    os.chown(here / name, 65534, 65534)
    assert found(tmp_path) is None
    assert "belongs to another user (uid 65534)" in capsys.readouterr().err


def test_this_user_is_the_effective_user() -> None:
    assert ownership.this_user()[0] == os.geteuid()
