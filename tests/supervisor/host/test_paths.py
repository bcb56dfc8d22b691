import os
import stat
from pathlib import Path

import pytest

from supervisor.errors import AccessDenied
from supervisor.host.paths import (
    Directories,
    check_owner,
    directories,
    is_ours,
    make_ours,
    make_private,
    problem,
    shipped,
)


def test_shipped_profiles_and_pins_are_found() -> None:
    assert (shipped("profiles") / "base.toml").is_file()
    assert (shipped("vendor") / "engine.toml").is_file()


def test_corral_variables_win_over_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORRAL_LOG_DIR", raising=False)
    monkeypatch.setenv("LOGS_DIRECTORY", "/var/log/corral:/var/log/other")
    assert directories().log == Path("/var/log/corral")
    monkeypatch.setenv("CORRAL_LOG_DIR", "~/logs")
    assert directories().log == Path.home() / "logs"


def test_a_user_without_a_home_needs_every_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in /etc/passwd
    for name in ("CONFIG", "CACHE", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    for kind in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{kind}_DIR", f"/srv/{kind}")
    assert directories().data == Path("/srv/DATA")
    monkeypatch.delenv("CORRAL_CACHE_DIR")
    with pytest.raises(AccessDenied) as caught:
        directories()
    assert caught.value.hint == "set HOME or CORRAL_CACHE_DIR to an absolute path"


def test_a_directory_is_made_private(tmp_path: Path) -> None:
    made = make_private(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert make_private(made).stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x", "utf-8")
    with pytest.raises(AccessDenied, match="cannot use the directory"):
        make_private(tmp_path / "log" / "deep")


def test_a_socket_path_that_is_too_long_is_none(tmp_path: Path) -> None:
    def where(runtime: Path) -> Directories:
        return Directories(tmp_path, tmp_path, tmp_path, tmp_path, runtime)

    assert where(Path("/run/corral")).engine_socket("chat.0") == Path("/run/corral/chat.0.sock")
    assert where(Path("/run") / ("x" * 100)).engine_socket("chat.0") is None


def test_without_a_session_the_runtime_directory_is_not_in_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert directories().runtime.is_relative_to(Path.home())


@pytest.mark.parametrize(
    ("mode", "uid", "said"),
    [
        (stat.S_IFDIR | 0o700, 1000, None),
        (stat.S_IFDIR | 0o700, 0, "belongs to another user"),
        (stat.S_IFDIR | 0o700, 65534, "belongs to another user (uid 65534)"),
        (stat.S_IFDIR | 0o750, 1000, "is open to others (mode 750)"),
        (stat.S_IFDIR | 0o1777, 1000, "is open to others"),
        (stat.S_IFLNK | 0o777, 1000, "is not a directory"),
    ],
)
def test_a_directory_is_checked_for_type_owner_and_mode(
    mode: int, uid: int, said: str | None
) -> None:
    found = problem(mode, uid, 1000, 0o077)
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


@pytest.mark.parametrize("what", ["open", "a file", "missing", "another's"])
def test_a_session_directory_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    session = tmp_path / "session"
    if what == "a file":
        session.touch()
    elif what != "missing":
        session.mkdir(mode=0o755 if what == "open" else 0o700)
    if what == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert directories().runtime.is_relative_to(Path.home())
    assert "instead of XDG_RUNTIME_DIR" in capsys.readouterr().err


def test_a_private_session_directory_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "s").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "s"))
    assert directories().runtime == tmp_path / "s" / "llama-corral"


def test_a_link_is_refused_as_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(AccessDenied, match="is not a directory of this user"):
        make_private(tmp_path / "link")
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o755


def test_a_directory_that_all_users_share_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    for make in (make_private, make_ours):
        with pytest.raises(AccessDenied, match="is not a directory of this user"):
            make(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_a_directory_that_may_be_shared_for_reading_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    assert make_ours(tmp_path).stat().st_mode & 0o777 == 0o755


def test_a_directory_that_others_can_write_is_not_ours(tmp_path: Path) -> None:
    directory = make_private(tmp_path / "a")
    assert is_ours(directory)
    directory.chmod(0o720)
    assert not is_ours(directory)
    directory.chmod(0o700)
    tmp_path.chmod(0o777)
    assert not is_ours(directory)
    assert not is_ours(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = make_private(tmp_path / "theirs")
    os.chown(directory, 65534, 65534)
    for make in (make_private, make_ours):
        with pytest.raises(AccessDenied, match="is not a directory of this user"):
            make(directory)
    assert not is_ours(directory)


def test_a_socket_in_a_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_owner(tmp_path)
    check_owner(tmp_path / "none")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(AccessDenied):
        check_owner(tmp_path)
